"""``accelerate launch`` as people use it: processes of its own, and scripts that tell what they see."""

from __future__ import annotations

import json
import py_compile
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.command import MODULE, Running, accelerate, launch, launch_variables, start
from tests.support.environment import clean
from tests.support.ranks import RankServer

# What a rank was told, as one line of JSON.
TELL = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
         "ACCELERATE_USE_CPU", "ACCELERATE_MIXED_PRECISION", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID")
told = {name: os.environ[name] for name in names if name in os.environ}
print(json.dumps({**told, "argv": sys.argv[1:], "torch": "torch" in sys.modules}))
"""


def told(stdout: str) -> list[dict[str, object]]:
    """What each rank said, by rank."""
    lines = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line.get("RANK", "0"))


# ---------------------------------------------------------------- processes


def test_two_processes_on_the_cpu_are_a_world_of_two() -> None:
    """F1, F10: both short and long spellings; nothing of torch comes from the launcher."""
    for flags in (("--cpu", "-n", "2"), ("--cpu", "--num-processes=2"), ("--cpu", "--nproc_per_node", "2")):
        result = launch(*flags, script_text=TELL)
        assert result.returncode == 0, result.output
        ranks = told(result.stdout)
        assert [rank["RANK"] for rank in ranks] == ["0", "1"]
        for rank in ranks:
            assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"], rank["GROUP_RANK"]) == ("2", "2", "0")
            assert rank["LOCAL_RANK"] == rank["RANK"]
            assert (rank["MASTER_ADDR"], rank["ACCELERATE_USE_CPU"]) == ("127.0.0.1", "true")
            assert rank["torch"] is False
        assert len({rank["MASTER_PORT"] for rank in ranks}) == 1
        assert result.stderr == ""


def test_one_process_becomes_the_script() -> None:
    """It keeps the launcher's process id, and is told nothing about a world."""
    running = Running([*MODULE, "launch"], script_text=f"{TELL}\nprint(os.getpid())")
    result = running.wait()
    assert result.stdout.splitlines()[-1] == str(running.pid)
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & told(result.stdout)[0].keys()


STALE = [{"RANK": "0"}, {"WORLD_SIZE": "8"}, {"RANK": "3", "WORLD_SIZE": "1"}, {"LOCAL_RANK": "2"}]


def world() -> tuple[int, bool]:
    """Return the size of the world, and whether a group is open."""
    import torch

    from accelerate import PartialState

    return PartialState().num_processes, torch.distributed.is_initialized()


@pytest.mark.parametrize("flags", [(), ("--tee", "3")])
@pytest.mark.parametrize("env", STALE)
def test_one_process_inherits_no_place_of_an_earlier_job(
    ranks: RankServer, env: dict[str, str], flags: tuple[str, ...]
) -> None:
    """A variable that is left in a shell is no rank that somebody has started."""
    variables = launch_variables("--cpu", "-n", "1", *flags, env=env)
    assert ranks(1, world, env=variables) == [(1, False)]


def test_the_only_process_of_a_world_stays_one() -> None:
    """torchrun starts such a process, and scripts read its variables."""
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    result = launch("--cpu", "-n", "1", script_text=TELL, env={**world, "MASTER_ADDR": "127.0.0.1"})
    assert world.items() <= told(result.stdout)[0].items()


@pytest.mark.parametrize(
    ("flags", "has_group"),
    [
        (("--use_fsdp", "--tee", "3"), True),
        (("--use_deepspeed",), True),
        (("--config_file", "multi.yaml", "--main_process_port", "0"), True),
        (("--cpu", "--mixed_precision", "bf16"), False),
    ],
)
def test_one_process_opens_a_group_for_training_that_uses_one(
    ranks: RankServer, flags: tuple[str, ...], has_group: bool, tmp_path: Path
) -> None:
    """As in 1.x: scripts for FSDP and several accelerators ask torch.distributed for their rank."""
    (tmp_path / "multi.yaml").write_text("distributed_type: FSDP\nnum_processes: 1\n")
    variables = launch_variables("-n", "1", *flags, cwd=tmp_path)
    assert ranks(1, world, env=variables) == [(1, has_group)]


# Starts another launch from rank 0, and leaves what its processes say.
OUTER = """
import os, subprocess, sys
if os.environ.get("RANK", "0") == "0":
    subprocess.run([sys.executable, "-m", "accelerate", "launch", *sys.argv[1:]], check=True)
"""


@pytest.mark.parametrize("outer", [("-n", "2", "--use_fsdp"), ("-n", "1")])
@pytest.mark.parametrize(
    ("inner", "size", "precision"),
    [
        ((), None, None),
        (("-n", "2", "--mixed_precision", "no"), "2", "no"),
        (("--config_file", "no.yaml", "-n", "2"), "2", "no"),
    ],
)
def test_a_launch_inside_a_rank_is_a_job_of_its_own(
    outer: tuple[str, ...], inner: tuple[str, ...], size: str | None, precision: str | None, tmp_path: Path
) -> None:
    """Its flags and its file count, and nothing that the outer launch has told its script."""
    (tmp_path / "inner.py").write_text(TELL.replace('"OMP_NUM_THREADS"', '"ACCELERATE_USE_FSDP"'))
    (tmp_path / "no.yaml").write_text("mixed_precision: 'no'\n")
    result = launch(
        *("--cpu", "--mixed_precision", "bf16", *outer),
        script_text=OUTER,
        script_args=("--cpu", *inner, "inner.py"),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.output
    ranks = told(result.stdout)
    assert [rank.get("RANK") for rank in ranks] == ([None] if size is None else ["0", "1"])
    for rank in ranks:
        assert (rank.get("WORLD_SIZE"), rank.get("ACCELERATE_MIXED_PRECISION")) == (size, precision)
        assert ("MASTER_PORT" in rank, "ACCELERATE_USE_FSDP" in rank) == (size is not None, False)
    assert ("started inside rank 0 of 2" in result.stderr) == (outer != ("-n", "1"))


def test_what_a_script_sets_for_a_launch_of_its_own_counts(tmp_path: Path) -> None:
    """Only what the outer launch has set is taken back; a variable of the shell stands again."""
    (tmp_path / "inner.py").write_text(TELL)
    sets = OUTER.replace("import os", "import os; os.environ['ACCELERATE_MIXED_PRECISION'] = 'no'\nimport os")
    for script, precision in ((OUTER, "fp16"), (sets, "no")):
        result = launch(
            *("--cpu", "-n", "2", "--mixed_precision", "bf16"),
            script_text=script,
            script_args=("--cpu", "inner.py"),
            env={"ACCELERATE_MIXED_PRECISION": "fp16"},
            cwd=tmp_path,
        )
        assert [rank["ACCELERATE_MIXED_PRECISION"] for rank in told(result.stdout)] == [precision]


def test_an_address_of_another_network_is_not_where_one_machine_meets() -> None:
    """1.x too takes it for several machines only; the launch would wait for it in silence."""
    result = launch("--cpu", "-n", "2", "--main_process_ip", "10.255.0.5", script_text=TELL)
    assert result.returncode == 0, result.output
    ranks = told(result.stdout)
    assert [(rank["RANK"], rank["WORLD_SIZE"], rank["MASTER_ADDR"]) for rank in ranks] == [
        ("0", "2", "127.0.0.1"),
        ("1", "2", "127.0.0.1"),
    ]
    assert "--main_process_ip has no effect" in result.stderr


def test_a_script_may_come_from_standard_input(tmp_path: Path) -> None:
    def pipe(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [*MODULE, "launch", "--cpu", *flags, "-", "a"]
        text = "import sys; print(__name__, sys.argv)"
        env = clean() | {"HF_HOME": str(tmp_path)}
        return subprocess.run(command, input=text, capture_output=True, text=True, env=env, check=False)

    assert pipe().stdout == "__main__ ['-', 'a']\n"
    for flags in (("-n", "2"), ("--tee", "3"), ("--max_restarts", "1"), ("--print_manifest", "jobset")):
        refused = pipe(*flags)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "the script is read from standard input (-)" in refused.stderr


def test_a_world_of_two_in_torch() -> None:
    """F1: the group is real, and gathers from both."""
    result = launch(
        "--cpu",
        "-n",
        "2",
        script_text="""
            import torch
            from accelerate import PartialState
            from accelerate.utils import gather
            state = PartialState()
            ranks = gather(torch.tensor([state.process_index])).tolist()
            print(state.num_processes, state.device.type, ranks)
            state.destroy_process_group()
        """,
    )
    assert result.returncode == 0, result.output
    assert result.stdout.splitlines() == ["2 cpu [0, 1]"] * 2


def test_torchrun_alone_makes_the_same_world() -> None:
    """F2: without any variable of ours."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    result = Running(
        torchrun,
        # One write for each line: torchrun starts Python unbuffered, so the parts of a print would mix.
        script_text="""
            import sys
            from accelerate import PartialState
            state = PartialState()
            sys.stdout.write(f"world {state.num_processes} {state.device.type}\\n")
            state.destroy_process_group()
        """,
    ).wait()
    assert result.returncode == 0, result.output
    assert result.stdout.splitlines() == ["world 2 cpu"] * 2


def test_settings_travel_by_their_variables() -> None:
    result = launch("--mixed_precision", "bf16", script_text=TELL, env={"ACCELERATE_USE_CPU": "yes"})
    (rank,) = told(result.stdout)
    assert (rank["ACCELERATE_MIXED_PRECISION"], rank["ACCELERATE_USE_CPU"]) == ("bf16", "true")


# ---------------------------------------------------------------- the script sees what Python shows it

ARGUMENTS = ["a b", "--", "--cpu", "-n", "3", 'it\'s "quoted"', "", "-m", "*", "$HOME", "\\"]
MIRROR = """
import sys
if __name__ == "__main__":
    import multiprocessing, os, pickle
    class Here: pass
    same = type(pickle.loads(pickle.dumps(Here()))) is Here
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply(ord, "a")
    here = os.path.dirname(os.path.abspath(sys.argv[0])) + os.sep
    print([sys.argv[0].replace(here, "")], sys.argv[1:], sys.orig_argv[1:], __file__, __package__,
          __spec__ and (__spec__.name, __spec__.origin), type(__loader__).__name__, __cached__, sys.path[:2],
          __builtins__,
          sorted(name for name in globals() if name != "__conditional_annotations__"), same, spawned)
"""


@pytest.mark.parametrize("kind", ["script", "elsewhere", "module", "package", "folder", "link"])
def test_a_rank_sees_what_python_would_show_it(tmp_path: Path, kind: str) -> None:
    """F9: arguments, ``__main__``, its module attributes, the path, pickling and spawning: as without us."""
    (tmp_path / "inner").mkdir()
    for path in ("mirror.py", "inner/mirror.py", "inner/__main__.py"):
        (tmp_path / path).write_text(MIRROR)
    (tmp_path / "inner/__init__.py").touch()
    (tmp_path / "link.py").symlink_to("inner/mirror.py")
    program = {
        "script": ["mirror.py"],
        "elsewhere": ["inner/mirror.py"],
        "module": ["-m", "inner.mirror"],
        "package": ["-m", "inner"],
        "folder": ["inner"],
        "link": ["link.py"],
    }[kind]
    plain = Running([sys.executable, *program, *ARGUMENTS], cwd=tmp_path).wait()
    assert plain.returncode == 0, plain.output
    for processes in (1, 2):
        result = launch("--cpu", "-n", str(processes), *program, *ARGUMENTS, cwd=tmp_path)
        assert result.returncode == 0, result.output
        assert result.stdout.splitlines() == plain.stdout.splitlines() * processes


SCRIPTS = {
    "syntax": "x = 1\nif x\n    pass\n",
    "warning": "print('a' is 'a')\n",
    "encoding": "# coding: latin-1\nprint(ascii('\xe9'))\n",
    "raises": "def f():\n    raise ValueError('no data')\n\nf()\n",
    "assertion": "assert False, 'an assertion'\n",
}


@pytest.mark.parametrize("optimize", [None, "1"])
@pytest.mark.parametrize("kind", SCRIPTS)
def test_python_says_of_a_script_what_it_says_without_us(
    tmp_path: Path, kind: str, optimize: str | None
) -> None:
    """F9: what Python has to say of a script, each rank says."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[kind], encoding="latin-1")
    env = {"PYTHONOPTIMIZE": optimize}
    plain = Running([sys.executable, str(script)], env=env).wait()
    result = launch("--cpu", "-n", "2", path=script, env=env)
    assert (result.returncode, result.stdout) == (plain.returncode, plain.stdout * 2), result.output
    if plain.returncode:
        head = "accelerate launch: all 2 ranks failed (exit code 1), in the same way\n"
        assert result.stderr == head + plain.stderr
    else:
        assert sorted(result.stderr.splitlines()) == sorted(plain.stderr.splitlines() * 2)


def test_a_compiled_script_runs_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nprint(__name__, sys.argv[1:])")
    compiled = tmp_path / "script.pyc"
    py_compile.compile(str(tmp_path / "script.py"), str(compiled), doraise=True)
    result = launch("--cpu", "-n", "2", "-q", str(compiled), "a")
    assert result.stdout == "__main__ ['a']\n" * 2, result.output
    compiled.write_bytes(b"of another Python, or none")
    result = launch("--cpu", "-n", "2", "-q", str(compiled))
    assert result.returncode == 1
    assert "script.pyc was not compiled by this version of Python" in result.stderr


def test_a_program_that_is_no_python() -> None:
    result = launch("--no_python", "--cpu", "-n", "2", "sh", "-c", 'echo "$RANK $1 $2"', "sh", "a b", "--")
    assert sorted(result.stdout.splitlines()) == ["0 a b --", "1 a b --"]
    result = launch("--no_python", "--cpu", "-n", "2", "no-such-program")
    assert result.returncode == 2
    assert "the program no-such-program cannot be started" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_pipe_of_a_shell_script_breaks(count: str) -> None:
    """Python ignores SIGPIPE, and a shell cannot undo what it inherits."""
    pipe = "while :; do echo endless; done | head -n 1"
    result = launch("--no_python", "--cpu", "-n", count, "bash", "-c", pipe, timeout=20)
    assert (result.returncode, result.stdout, result.stderr) == (0, "endless\n" * int(count), "")


def test_a_shell_script_without_an_interpreter_line_is_told_to_name_one(tmp_path: Path) -> None:
    program = tmp_path / "train.sh"
    program.write_text("echo started\n")
    program.chmod(0o755)
    result = launch("--no_python", "--cpu", "-n", "2", str(program))
    assert result.returncode == 2
    assert "its first line name the program that reads it: #!/bin/sh" in result.stderr


def test_the_first_rank_alone_reads_what_is_typed(tmp_path: Path) -> None:
    """Several readers of one terminal would each get some of the lines."""
    script = tmp_path / "reads.py"
    script.write_text("import os, sys; print(os.environ['RANK'], sys.stdin.read())")
    command = f"echo typed | {sys.executable} -m accelerate launch --cpu -n 2 {script}"
    result = Running(["sh", "-c", command]).wait()
    assert sorted(result.stdout.split("\n")) == ["", "", "0 typed", "1 "]


# ---------------------------------------------------------------- ports


def test_a_busy_port_is_replaced_and_one_line_says_so() -> None:
    """F7."""
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        result = launch("--cpu", "-n", "2", "--main_process_port", str(port), script_text=TELL)
    assert result.returncode == 0, result.output
    (used,) = {rank["MASTER_PORT"] for rank in told(result.stdout)}
    assert used not in ("0", str(port))
    assert re.fullmatch(
        rf"accelerate launch: port {port} is in use .*; rank 0 listens on {used} instead\n", result.stderr
    )


def test_two_launches_at_once_get_a_port_each(tmp_path: Path) -> None:
    """F7: also when both ask for the same one, before either's rank 0 listens on it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # Every rank stays until all of all jobs are there.
    wait = f"""{TELL}
import tempfile, time
tempfile.mkstemp(dir={str(tmp_path)!r})
while len(os.listdir({str(tmp_path)!r})) < 8:
    time.sleep(0.05)
"""
    flags = ((), ("--main_process_port", "0"), ("--master_port", port), ("--master-port", port))
    jobs = [start("--cpu", "-n", "2", *each, script_text=wait) for each in flags]
    results = [job.wait() for job in jobs]
    assert [result.returncode for result in results] == [0] * 4
    ports = [{str(rank["MASTER_PORT"]) for rank in told(result.stdout)} for result in results]
    assert [len(each) for each in ports] == [1] * 4
    assert len(set.union(*ports)) == 4
    assert port in ports[2] | ports[3]
    assert sum(f"port {port} is in use" in result.stderr for result in results) == 1


def test_rank_0_can_listen_on_the_port_that_was_kept_for_it() -> None:
    result = launch(
        "--cpu",
        "-n",
        "2",
        script_text="""
            import os, socket
            if os.environ["RANK"] == "0":
                place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                try:
                    socket.create_server(place, reuse_port=False).close()
                    print("listened")
                except OSError as error:
                    print(error)
        """,
    )
    assert result.stdout == "listened\n", result.output


# ---------------------------------------------------------------- configuration files


def test_a_default_file_is_used_only_with_one_line_that_says_so(tmp_path: Path) -> None:
    """F6: --config_file wins over it."""
    default = tmp_path / "home/accelerate/default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text("mixed_precision: bf16\n")
    home = {"HF_HOME": str(tmp_path / "home")}

    def run(*flags: str) -> tuple[object, str]:
        result = launch(*flags, script_text=TELL, env=home, cwd=tmp_path)
        assert result.returncode == 0, result.output
        return told(result.stdout)[0].get("ACCELERATE_MIXED_PRECISION"), result.stderr

    assert run() == ("bf16", f"accelerate launch: settings from {default} (--config_file names another)\n")
    assert run("--quiet") == ("bf16", "")
    (tmp_path / "mine.yaml").write_text("mixed_precision: 'no'\n")
    assert run("--config_file", "mine.yaml") == ("no", "")


def test_a_file_says_how_many_processes(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 3\nmixed_precision: no\n")
    result = launch("--config_file", str(tmp_path / "job.yaml"), script_text=TELL)
    ranks = told(result.stdout)
    assert [(rank["RANK"], rank["WORLD_SIZE"]) for rank in ranks] == [(str(n), "3") for n in range(3)]
    assert {rank["ACCELERATE_MIXED_PRECISION"] for rank in ranks} == {"no"}


# ---------------------------------------------------------------- output

NOISY = """
import os, sys
for line in range(200):
    print("out", os.environ["RANK"], line)
    print("err", os.environ["RANK"], line, file=sys.stderr)
print("unfinished", end="")
"""


def test_lines_of_ranks_do_not_cut_into_each_other() -> None:
    result = launch("--cpu", "-n", "2", script_text=NOISY.rsplit("\n", 2)[0])
    assert sorted(result.stdout.splitlines()) == sorted(f"out {r} {n}" for r in (0, 1) for n in range(200))


def test_output_is_logged_and_marked(tmp_path: Path) -> None:
    result = launch("--cpu", "-n", "2", "--log_dir", str(tmp_path / "logs"), script_text=NOISY)
    assert result.returncode == 0, result.output
    for rank in (0, 1):
        log = (tmp_path / f"logs/rank_{rank}.log").read_text().splitlines()
        assert sorted(log) == sorted(
            [*(f"{s} {rank} {n}" for s in ("out", "err") for n in range(200)), "unfinished"]
        )
        assert f"[rank {rank}] out {rank} 199" in result.stdout
        assert f"[rank {rank}] err {rank} 199" in result.stderr


def test_output_of_some_ranks_is_marked() -> None:
    result = launch("--cpu", "-n", "2", "--tee", "1:1", script_text=NOISY)
    assert "[rank 1] out 1 7\n" in result.stdout
    assert "\nout 0 7\n" in result.stdout
    assert "\nerr 1 7\n" in result.stderr


TALKATIVE = """
import os, sys
for line in range(4000):  # more than a pipe holds
    print("x" * 60, line, flush=True)
    print("y" * 60, line, file=sys.stderr, flush=True)
open(f"done{os.environ['RANK']}", "w").close()
"""


@pytest.mark.parametrize("redirect", ["2>err.txt", "2>&1"])
def test_a_full_disk_and_a_closed_console_stop_nothing(tmp_path: Path, redirect: str) -> None:
    """G10: the log of rank 0 is on a full disk, and `head` has gone after a line."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0.log").symlink_to("/dev/full")
    (tmp_path / "train.py").write_text(TALKATIVE)
    command = f"{shlex.join([*MODULE, 'launch'])} --cpu -n 2 --log_dir logs train.py {redirect}"
    shell = ["bash", "-o", "pipefail", "-c", f"{command} | head -n 1"]
    result = Running(shell, cwd=tmp_path).wait(timeout=60)
    assert result.returncode == 0, result.output
    assert len(result.stdout.splitlines()) == 1
    assert {"done0", "done1"} <= {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "logs/rank_1.log").read_text().count("\n") == 8000
    if redirect == "2>err.txt":
        notes = [line for line in (tmp_path / "err.txt").read_text().splitlines() if "accelerate:" in line]
        assert sum("rank_0.log is not written any more: No space left" in line for line in notes) == 1
        assert sum("nobody reads this output" in line for line in notes) == 1


@pytest.mark.parametrize("end", ["read", "interrupt"])
def test_a_good_job_waits_for_a_slow_console(tmp_path: Path, end: str) -> None:
    """Its ranks have ended, and what they wrote fits into pipes; Ctrl-C ends the wait alone."""
    script = tmp_path / "train.py"
    script.write_text("import os\nprint('x' * 99 * 600)\nopen(f\"done{os.environ['RANK']}\", 'w').close()")
    command = [*MODULE, "launch", "--cpu", "-n", "2", "--tee", "3", str(script)]
    with subprocess.Popen(
        command, cwd=tmp_path, env=clean({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        while not {"done0", "done1"} <= {path.name for path in tmp_path.iterdir()}:
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(2.5)
        assert process.poll() is None
        if end == "interrupt":
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 0
        out, err = process.communicate()
        assert process.returncode == 0, err
    assert err == b""
    if end == "read":
        assert sorted(out.decode().splitlines()) == [f"[rank {rank}] {'x' * 99 * 600}" for rank in (0, 1)]


# ---------------------------------------------------------------- as a function, as a command

AS_FUNCTION = """
import sys, threading
from accelerate.commands.launch import launch_command, launch_command_parser
work = "import os, sys; print('rank', os.environ.get('RANK'), sys.argv[1:]); sys.exit(int(sys.argv[1]))"
open("work.py", "w").write(work)
for n in ("1", "2"):
    launch_command(launch_command_parser().parse_args(["--cpu", "-n", n, "work.py", "0", "--x"]))
print("returned", "torch" in sys.modules)
try:
    launch_command(launch_command_parser().parse_args(["--cpu", "-n", "1", "work.py", "3"]))
except RuntimeError as error:
    print("raised", type(error).__name__, error.code)
work = launch_command_parser().parse_args(["-n2", "work.py", "0"])
thread = threading.Thread(target=launch_command, args=(work,))
thread.start()
thread.join()
"""


def test_the_function_returns_or_raises_and_never_replaces_its_caller() -> None:
    result = Running([sys.executable], script_text=AS_FUNCTION).wait()
    assert result.returncode == 0, result.output
    lines = result.stdout.splitlines()
    ranks = ["0 ['0', '--x']", "0 ['0']", "1 ['0', '--x']", "1 ['0']", "None ['0', '--x']", "None ['3']"]
    assert sorted(line.removeprefix("rank ") for line in lines if line.startswith("rank")) == ranks
    assert [line for line in lines if not line.startswith("rank")] == [
        "returned False",
        "raised RankProcessError 3",
    ]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--cpu", "--multi_gpu", "script.py"], "--cpu and --multi_gpu do not go together"),
        (["--multi_gpu", "script.py"], "none was found on this machine"),
        (["--machine_rank", "1", "script.py"], "--machine_rank is 1, but num_machines is 1 (the default)"),
        (["scirpt.py"], "did you mean script.py?"),
        (["--dry_run", "-n", "99999999999", "script.py"], "--num_processes is 99999999999, but"),
    ],
)
def test_a_mistake_ends_with_2_and_no_traceback(tmp_path: Path, args: list[str], words: str) -> None:
    (tmp_path / "script.py").touch()
    result = accelerate("launch", *args, cwd=tmp_path)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
