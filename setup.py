"""The one field of the metadata that pyproject.toml cannot give; all others are there."""

from setuptools import setup

# sentence-transformers and others train only if the Home-page of a package named accelerate has "huggingface" in it.
# This is where the API is documented that this package implements.
setup(url="https://huggingface.co/docs/accelerate")
