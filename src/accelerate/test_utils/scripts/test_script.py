"""The script that ``accelerate test`` launches: the checks of ``accelerate.check``, on every process."""


def main() -> None:
    """Run the checks, and end this process with code 1 if one failed."""
    from accelerate.check import run

    run.main()


if __name__ == "__main__":
    main()
