"""Functions of notebooks, tests and scripts on several processes; the notebooks run in real kernels."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from accelerate import Accelerator, PartialState, debug_launcher, notebook_launcher
from accelerate.core.errors import LaunchError
from tests.cpu.test_docs_pages import blocks
from tests.support.command import Running
from tests.support.environment import ROOT, clean
from tests.support.free_ports import free_port
from tests.support.long_run import LONG_RUN, long_run_param
from tests.support.notebook_servers import IMPORTED, kernel_flags, share_servers
from tests.support.ranks import NO_LAUNCHER, RankServer
from tests.support.scripts import run_to_exit

if TYPE_CHECKING:
    from jupyter_client.blocking.client import BlockingKernelClient
    from jupyter_client.manager import KernelManager


@pytest.fixture(autouse=True)
def _shared_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    share_servers(monkeypatch, tmp_path, "accelerate.facade.accelerator", __name__)


# ------------------------------------------------------------------------------------------- one notebook

PAGE = list(blocks("notebooks.md"))

SETUP = """
import os, pickle, random, signal, socket, sys, threading, warnings
import numpy, torch
from accelerate import Accelerator, notebook_launcher

def state():
    signals = [n for n in signal.valid_signals() if n not in (signal.SIGKILL, signal.SIGSTOP)]
    return (
        dict(os.environ), [signal.getsignal(n) for n in signals], random.getstate(),
        numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist(), torch.get_num_threads(),
    )

before = state()
"""

# name -> its code; each is a cell of its own.
CELLS = {
    "setup": SETUP,
    "values": """
        SCALE = 3
        class Net:
            def __init__(self, x):
                self.x = x * SCALE
        def train(x):
            print("start", x)
            print("to stderr", file=sys.stderr)
            assert type(pickle.loads(pickle.dumps(Net(1)))) is Net  # also found in __main__ there
            sys.stdout.write("no newline at the end")
            return Net(x + int(os.environ["RANK"]))
        results = notebook_launcher(train, (5,), num_processes=2)
        print([type(result) is Net for result in results], [result.x for result in results])
    """,
    "bar": """
        def train():
            from tqdm import tqdm
            for i in tqdm(range(3), file=sys.stdout, ncols=30, mininterval=0):
                pass
        notebook_launcher(train, num_processes=2)
    """,
    "training": """
        from torch.utils.data import DataLoader, TensorDataset
        def train(steps):
            torch.manual_seed(0)
            accelerator = Accelerator(cpu=True)
            model = torch.nn.Linear(4, 1)
            data = TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
            for x, y in loader:
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            weight = accelerator.unwrap_model(model).weight
            return weight, accelerator.num_processes, accelerator.mixed_precision, loss
        (one, size, precision, loss), (two, *_) = notebook_launcher(
            train, (4,), num_processes=2, mixed_precision="bf16"
        )
        print(torch.equal(one, two), size, precision, loss.requires_grad)
    """,
    "error": """
        def fail():
            rank = int(os.environ["RANK"])
            if rank == 1:
                raise LookupError("no such file: part-3.txt")
            threading.Event().wait(600)
        notebook_launcher(fail, num_processes=2)
    """,
    "caught": """
        try:
            notebook_launcher(fail, num_processes=2)
        except Exception as error:
            print(error.rank, type(error.__cause__).__name__, error.code)
    """,
    "copies": """
        lock = threading.Lock()
        def locked(x):
            with lock:
                print("holds it")
            if x:
                raise KeyError(x)
            return os.environ["LOCAL_RANK"]
        print(notebook_launcher(locked, (0,), num_processes=2))
    """,
    "copies_fail": "notebook_launcher(locked, (1,), num_processes=2)",
    "port": """
        taken = socket.create_server(("", 0))
        def meet():
            return float(Accelerator(cpu=True).reduce(torch.ones(1)))
        print(notebook_launcher(meet, num_processes=2, use_port=str(taken.getsockname()[1])))
        taken.close()
    """,
    "restarts": """
        def flaky():
            attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            if attempt == 0 and os.environ["RANK"] == "1":
                raise OSError("once")
            return attempt
        print(notebook_launcher(flaky, num_processes=2, max_restarts=2,
                                log_line_prefix_template="<${local_rank}> "))
    """,
    "prefix": """
        notebook_launcher(print, ("hello",), num_processes=2, log_line_prefix_template="<${local_rank}> ")
    """,
    "returned": """
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            print(notebook_launcher(threading.Lock, num_processes=2))
        print(len(said), said[0].message)
    """,
    "outside": """
        accelerator = Accelerator(cpu=True)
        def uses():
            return accelerator.device
        notebook_launcher(uses, num_processes=2)
    """,
    "exits": """
        def leave():
            sys.exit("had enough")
        notebook_launcher(leave, num_processes=2)
    """,
    "same": """
        print(*(one == two for one, two in zip(before, state(), strict=True)))
        print([thread.name for thread in threading.enumerate() if "_pump" in thread.name])
    """,
}


class Cell:
    """What a cell showed: stdout and stderr, and the name and text of its error."""

    def __init__(self, cell: Any) -> None:
        def joined(name: str) -> str:
            return "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == name)

        errors = [output for output in cell.outputs if output.output_type == "error"]
        self.out, self.err = joined("stdout"), joined("stderr")
        self.error, self.text = (errors[0].ename, errors[0].evalue) if errors else ("", "")

    def lines(self) -> list[str]:
        """Lines of stdout, sorted: ranks print in any order."""
        return sorted(self.out.splitlines())


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    """One notebook, run from its first cell to its last in one kernel: those of the page, then ours.

    One fork server serves all launches: the kernel has the variables that either launcher would set. It
    imports at once what it otherwise does while it is idle, which it is not here: each rank would do so.
    """
    import nbformat
    from nbclient import NotebookClient

    code = [block.code for block in PAGE] + [textwrap.dedent(text).strip() for text in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, code)))
    folder = tmp_path_factory.mktemp("notebook")
    flags = kernel_flags(folder, *IMPORTED)
    options: dict[str, Any] = {"kernel_name": "python3", "allow_errors": True, "timeout": 120}
    client = NotebookClient(notebook, extra_arguments=flags, **options)
    env = clean({"THP_MEM_ALLOC_ENABLE": 1, "GLOO_SOCKET_IFNAME": "lo"})
    client.execute(env=env, cwd=str(folder))
    return list(map(Cell, notebook.cells))


@pytest.fixture(scope="module")
def cells(notebook: list[Cell]) -> dict[str, Cell]:
    """Our cells."""
    return dict(zip(CELLS, notebook[len(PAGE) :], strict=True))


def test_a_function_of_the_notebook_runs_with_what_it_uses(cells: dict[str, Cell]) -> None:
    """A5, F14: a class and a variable of the notebook go with it, and the results are of that class."""
    cell = cells["values"]
    assert cell.error == "", cell.text
    assert cell.out.startswith("Launching training on 2 CPUs.\n")
    assert cell.out.endswith("[True, True] [15, 18]\n")


def test_whole_lines_arrive_of_both_ranks(cells: dict[str, Cell]) -> None:
    cell = cells["values"]
    for line in ("start 5", "no newline at the end"):
        assert cell.lines().count(line) == 2
    # Triton built by nanobind, as with torch 2.15, may print what it leaks when a process ends.
    written = re.sub(r"(nanobind:| - |See https://nanobind).*\n?", "", cell.err)
    assert sorted(written.splitlines()) == ["to stderr", "to stderr"]


def test_a_progress_bar_overwrites_its_own_line(cells: dict[str, Cell]) -> None:
    cell = cells["bar"]
    assert cell.error == "", cell.text
    pieces = cell.out.replace("\r", "\n").splitlines()
    assert sum(piece.startswith("100%") for piece in pieces) >= 2


def test_a_training_leaves_the_same_weights_on_all_ranks(cells: dict[str, Cell]) -> None:
    """The precision takes effect; the loss comes back without its graph."""
    assert cells["training"].error == "", cells["training"].text
    assert cells["training"].out.splitlines()[-1] == "True 2 bf16 False"


def test_an_exception_of_a_rank_is_raised_in_the_cell(cells: dict[str, Cell]) -> None:
    """The other rank, which would wait for ten minutes, is stopped."""
    cell = cells["error"]
    assert cell.error == "FunctionError"
    number = len(PAGE) + list(CELLS).index("error") + 1
    assert cell.text == "\n".join(
        [
            "rank 1 of 2 failed (LookupError), the others were stopped",
            "",
            "Traceback (most recent call last):",
            f"  Cell In[{number}], line 4, in fail",
            '    raise LookupError("no such file: part-3.txt")',
            "LookupError: no such file: part-3.txt",
        ]
    )


def test_the_exception_itself_is_the_cause(cells: dict[str, Cell]) -> None:
    """Also: a second launch in one kernel."""
    assert cells["caught"].out.splitlines()[-1] == "1 LookupError 1"


def test_what_cannot_be_sent_runs_in_copies_of_the_kernel(cells: dict[str, Cell]) -> None:
    assert cells["copies"].error == "", cells["copies"].text
    said = "the variable 'lock', which locked() uses, (lock) cannot be pickled"
    assert said in cells["copies"].out
    assert cells["copies"].lines().count("holds it") == 2
    assert "['0', '1']" in cells["copies"].lines()


def test_an_exception_of_a_copy_is_raised_in_the_cell(cells: dict[str, Cell]) -> None:
    assert cells["copies_fail"].error == "FunctionError"
    assert cells["copies_fail"].text.endswith("KeyError: 1")
    assert "fork.py" not in cells["copies_fail"].text


def test_another_port_is_taken_when_one_is_in_use(cells: dict[str, Cell]) -> None:
    """F7"""
    assert cells["port"].error == "", cells["port"].text
    assert "is in use (Address already in use); rank 0 listens on" in cells["port"].out
    assert cells["port"].out.splitlines()[-1] == "[2.0, 2.0]"


def test_all_are_started_again_as_often_as_asked(cells: dict[str, Cell]) -> None:
    assert (
        "rank 1 of 2 failed (OSError), the others were stopped; starting all again (1 of 2)"
        in (cells["restarts"].out)
        or "rank 1 of 2 failed (OSError); starting all again (1 of 2)" in cells["restarts"].out
    )
    assert cells["restarts"].out.splitlines()[-1] == "[1, 1]"


def test_the_prefix_of_lines_can_be_chosen(cells: dict[str, Cell]) -> None:
    assert cells["prefix"].lines() == ["<0> hello", "<1> hello", "Launching training on 2 CPUs."]


def test_a_result_that_cannot_be_sent_back_is_said(cells: dict[str, Cell]) -> None:
    *_, results, warning = cells["returned"].out.splitlines()
    assert results == "[None, None]"
    assert "2 what rank 0 returned cannot be sent" in warning


def test_an_accelerator_of_the_notebook_is_refused(cells: dict[str, Cell]) -> None:
    assert "an Accelerator that was made outside of it" in cells["outside"].text
    assert "create it inside the function" in cells["outside"].text


def test_leaving_by_sys_exit_is_a_failure_with_its_message(cells: dict[str, Cell]) -> None:
    assert cells["exits"].error == "FunctionError"
    assert cells["exits"].text.endswith("had enough")


def test_the_kernel_is_as_it_was(cells: dict[str, Cell]) -> None:
    """Environment, signal handlers, random numbers (Python, NumPy, torch), torch's threads."""
    assert cells["same"].error == "", cells["same"].text
    assert cells["same"].out == "True True True True True True\n[]\n"


def test_the_page_on_notebooks_shows_what_its_cells_print(notebook: list[Cell]) -> None:
    for block, cell in zip(PAGE, notebook, strict=False):
        shown = f"{cell.out}{cell.text}".strip()
        # Two ranks print in any order.
        assert sorted(shown.splitlines()) == sorted((block.printed or "").splitlines()), shown


# -------------------------------------------------------------------------- a kernel that is stopped

WAITS = """
import os, threading
{more}
def wait():
    {uses}
    print("pid", os.getpid())
    threading.Event().wait(600)
from accelerate import notebook_launcher
notebook_launcher(wait, num_processes=2)
"""
FRESH = WAITS.format(more="", uses="pass")
COPIES = WAITS.format(more="lock = threading.Lock()", uses="lock.locked()")


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    """A kernel of its own, whose ranks need no module."""
    from jupyter_client.manager import start_new_kernel

    flags = kernel_flags(tmp_path)
    manager, client = start_new_kernel(
        kernel_name="python3", env=clean(), cwd=str(ROOT), extra_arguments=flags
    )
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def printed(client: BlockingKernelClient, cell: str, wanted: Callable[[str], bool]) -> str:
    """The output of a running cell, once it is as ``wanted``.

    On a busy machine ipykernel 7 was seen to name the cell before as the parent of what this one printed.
    """
    text = ""
    while not wanted(text):
        message: Any = client.get_iopub_msg(timeout=30)
        own = message["parent_header"].get("msg_id") == cell
        assert not (own and message["msg_type"] == "error"), message["content"]
        # Whatever comes of standard output is of this cell: that of the one before was read to its end.
        if message["msg_type"] == "stream" and (own or message["content"]["name"] == "stdout"):
            text += message["content"]["text"]
    return text


def begin(client: BlockingKernelClient, code: str) -> tuple[str, list[psutil.Process]]:
    """Runs the cell until both ranks have told their process ids.

    A kernel drops what is waiting after a cell's error, also what arrives just after its reply.
    """
    message = client.execute(code, stop_on_error=False)
    text = printed(client, message, lambda text: text.count("pid ") == 2 and text.endswith("\n"))
    return message, [
        psutil.Process(int(line.split("pid ")[1])) for line in text.splitlines() if "pid " in line
    ]


def test_interrupting_the_cell_ends_the_ranks_and_not_the_kernel(
    kernel: tuple[KernelManager, BlockingKernelClient],
) -> None:
    """F8, with fresh processes and with copies."""
    manager, client = kernel
    for code in (FRESH, COPIES):
        message, ranks = begin(client, code)
        manager.interrupt_kernel()
        reply: Any = client.get_shell_msg(timeout=30)
        while reply["parent_header"]["msg_id"] != message:  # what is left of the one before
            reply = client.get_shell_msg(timeout=30)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert not psutil.wait_procs(ranks, timeout=5)[1]
    answer: Any = client.execute_interactive("1 + 1", timeout=30, output_hook=lambda message: None)
    assert answer["content"]["status"] == "ok"


@pytest.mark.parametrize("code", [FRESH, COPIES], ids=["fresh", "copies"])
def test_no_rank_outlives_a_kernel_that_is_killed(
    kernel: tuple[KernelManager, BlockingKernelClient], code: str
) -> None:
    """F8"""
    manager, client = kernel
    _, ranks = begin(client, code)
    manager.signal_kernel(signal.SIGKILL)
    assert not psutil.wait_procs(ranks, timeout=5)[1]


# ------------------------------------------------------------------------------- debug_launcher


def test_copies_of_a_process_with_an_accelerator_are_refused() -> None:
    """Each would train as the only process of the world that it has inherited."""
    lock, accelerator = threading.Lock(), Accelerator()
    assert accelerator.num_processes == 1

    def train() -> int:
        with lock:
            return PartialState().num_processes

    with pytest.raises(LaunchError, match=r"'lock'.*cannot be pickled[\s\S]*accelerator\.end_training\(\)"):
        debug_launcher(train)
    accelerator.end_training()
    assert debug_launcher(train) == [2, 2]


def add(x: int) -> tuple[str, float, str]:
    """A function of a test module."""
    accelerator = Accelerator()
    accelerator.print("from rank 0 alone")
    total = accelerator.reduce(torch.tensor(float(accelerator.process_index + x)))
    return accelerator.device.type, total.item(), accelerator.distributed_type.value


def test_a_test_runs_a_function_on_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ), [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    values = debug_launcher(add, (1,))
    assert values == [("cpu", 3.0, "MULTI_CPU")] * 2
    assert "from rank 0 alone\n" in capsys.readouterr().out
    after = dict(os.environ), [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert before == after


class OddError(ValueError):
    """An exception of a test module."""


def test_a_test_gets_the_exception_of_the_rank() -> None:
    def fails(words: str) -> None:
        if Accelerator().process_index == 1:
            raise OddError(words)

    with pytest.raises(OddError, match="no data") as caught:
        debug_launcher(fails, ("no data",))
    cause = caught.value.__cause__
    assert isinstance(cause, LaunchError)
    assert "rank 1 of 2 failed (OddError)" in str(cause)
    assert f'File "{__file__}"' in str(cause)
    assert str(cause).endswith("no data")


def test_a_rank_that_is_killed_is_named() -> None:
    def dies() -> None:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(600)

    with pytest.raises(LaunchError, match=r"(?s)rank 1 of 2 was killed by SIGKILL.*memory runs out"):
        debug_launcher(dies)


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_function_may_leave_by_sys_exit(is_copy: bool) -> None:
    """Without a code, or with 0, that is an end without a result."""
    lock = threading.Lock() if is_copy else None

    def leaves(code: int | None, by: str) -> str:
        assert lock is None or lock.acquire()  # a lock cannot be sent: the ranks are copies of this process
        if by in ("all", os.environ["RANK"]):
            sys.exit(code)
        return "returned"

    assert debug_launcher(leaves, (0, "all")) == [None, None]
    assert debug_launcher(leaves, (None, "1")) == ["returned", None]
    with pytest.raises(LaunchError, match=r"rank 1 of 2 failed \(exit code 3\)"):
        debug_launcher(leaves, (3, "1"))


def test_a_rank_that_ends_without_a_result_is_said() -> None:
    def ends() -> int:
        if os.environ["RANK"] == "0":
            os._exit(0)
        return 1

    with pytest.warns(UserWarning, match=r"rank 0 ended \(os\._exit\) before its function did"):
        assert debug_launcher(ends) == [None, 1]


SCRIPT = """
    import sys
    from accelerate import debug_launcher

    class Box:
        def __init__(self, rank):
            self.rank = rank

    def train(box):
        from accelerate import Accelerator
        return Box(Accelerator().process_index + box.rank)

    # Nothing guards this: a fresh process must not run the script again.
    print([box.rank for box in debug_launcher(train, (Box(10),))])
"""


def test_a_script_needs_no_guard() -> None:
    """F14: a function and a class of ``__main__`` go by value; the script is not run again."""
    done = Running([sys.executable], script_text=SCRIPT).wait()
    assert done.returncode == 0, done.output
    assert done.stdout == "[10, 11]\n"
    assert not done.survivors()


STARTED = """
    import os, pickle, torch.multiprocessing
    from accelerate import Accelerator
    from accelerate.utils import PrepareForLaunch

    def train(word):
        accelerator = Accelerator(cpu=True)
        print(word, accelerator.process_index, accelerator.num_processes, flush=True)

    if __name__ == "__main__":
        starts = torch.multiprocessing.start_processes
        function = pickle.loads(pickle.dumps(PrepareForLaunch(train, "MULTI_CPU")))
        starts(function, ("rank",), nprocs=2, start_method={method!r})
        os.environ["ACCELERATE_DEBUG_RDV_FILE"] = os.path.abspath("meeting")
        starts(PrepareForLaunch(train, debug=True), ("debug",), nprocs=2, start_method="fork")
"""


@pytest.mark.parametrize("method", ["fork", long_run_param("spawn")])
def test_prepare_for_launch_serves_other_starters(ranks: RankServer, tmp_path: Path, method: str) -> None:
    """torch's; the caller tells size and address."""
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = {**NO_LAUNCHER, **told, "GLOO_SOCKET_IFNAME": "lo"}
    text = STARTED.format(method=method)
    if method == "spawn":  # the processes read the script again
        done = Running([sys.executable], script_text=text, env=env).wait()
        code, output = done.returncode, done.stdout
    else:
        ((code, output),) = run_to_exit(ranks, 1, text, tmp_path, env)
    assert code == 0, output
    said = sorted(re.findall(r"^(?:debug|rank) .*", output, re.MULTILINE))
    assert said == ["debug 0 2", "debug 1 2", "rank 0 2", "rank 1 2"]


# ------------------------------------------------------------------------------- several machines

MACHINE = """
    import sys
    from accelerate import notebook_launcher

    def train():
        import torch
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        print("rank", accelerator.process_index, "of", accelerator.num_processes)
        return float(accelerator.reduce(torch.tensor(accelerator.process_index + 1.0)))

    node, port = int(sys.argv[1]), sys.argv[2]
    print(notebook_launcher(train, num_processes=1, num_nodes=2, node_rank=node, use_port=port))
"""


def call_on_machine(folder: str, port: str) -> list[tuple[str | None, ...]]:
    """Launch on one of two machines, for which ranks of the test stand, and return what its rank was told."""
    node = int(os.environ["RANK"])
    for name in NO_LAUNCHER:
        del os.environ[name]

    def tell() -> tuple[str | None, ...]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
        return tuple(map(os.environ.get, names))

    place = Path(folder, str(node))
    place.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        share_servers(patch, place)
        return notebook_launcher(tell, num_processes=1, num_nodes=2, node_rank=node, use_port=port)


def test_ranks_of_two_machines_are_told_their_places(ranks: RankServer, tmp_path: Path) -> None:
    told = ranks(2, call_on_machine, str(tmp_path), str(free_port()))
    assert told == [[(str(node), "2", "0", "1", str(node), "127.0.0.1")] for node in range(2)]


@pytest.mark.skipif(not LONG_RUN, reason="runs in `make test-all`")
def test_two_machines_call_the_same_function() -> None:
    """Two launchers on one host stand for them."""
    port = str(free_port())
    machines = [
        Running([sys.executable], script_text=MACHINE, script_args=(str(node), port)) for node in range(2)
    ]
    for node, done in enumerate([machine.wait() for machine in machines]):
        assert done.returncode == 0, done.output
        assert f"\nrank {node} of 2\n" in done.stdout
        assert done.stdout.endswith("[3.0]\n")
        assert not done.survivors()
