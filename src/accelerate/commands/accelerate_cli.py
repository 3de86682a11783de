from accelerate.names import module_hooks

if __name__ == "__main__":
    from accelerate.cli.main import run_process

    raise SystemExit(run_process())

__getattr__, __dir__ = module_hooks(__name__)
