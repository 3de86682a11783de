"""What pyproject.toml cannot say about the package; all else is there."""

import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class CleanBuild(build_py):
    """Leaves no module of an earlier version in ``build/``: commands are found by their files."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


# sentence-transformers and others train only if the Home-page of a package named accelerate has
# "huggingface" in it. The API that this package implements is documented there.
setup(url="https://huggingface.co/docs/accelerate", cmdclass={"build_py": CleanBuild})
