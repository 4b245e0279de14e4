"""Submissions that cheat or do damage, as the text of ``bertlab/embeddings.py``.

All but the peeping ones hold a wrong `layer_norm` (exercise 2.1) and a trick that is to make it
count, or one that is to hurt somebody. Whatever they take is bounded, so that a grader that lets
them pass is found out by a test and not by the machine.
"""

from typing import NamedTuple

#: The name of every file and process that an attack tries to leave behind.
MARK = "bertlab-attack-left-this"


class Attack(NamedTuple):
    """A trick.

    Attributes:
        text: what is handed in; it stands below `PRELUDE`.
        reasons: what the grader may say; "wrong" and "raised" where the trick is simply no answer.
        seconds: how long it may take.
    """

    text: str
    reasons: str = "wrong"
    seconds: float = 30.0


PRELUDE = f"""
import ctypes, gc, json, mmap, os, resource, signal, socket, struct, sys, threading, time
import torch
from torch import Tensor

MARK = {MARK!r}

def channel():
    "The socket on which the grader asks."
    return next(x for x in gc.get_objects() if isinstance(x, socket.socket) and x.fileno() > 2)

def message(header, blob=b""):
    return struct.pack("<QQ", len(header), len(blob)) + header + blob

def answer(value):
    return message(json.dumps({{"dict": [["value", value], ["changed", None]]}}).encode())

def layer_norm(x, weight, bias, eps=1e-12):
    return 0.5 * x

"""

#: What makes a wrong answer look right, or so its author hopes. The sandbox stays whole.
CHEATS = {
    "patches torch's comparisons": Attack("""
always = lambda *a, **k: True
torch.equal = torch.allclose = torch.testing.assert_close = Tensor.equal = Tensor.allclose = always
Tensor.__eq__ = Tensor.all = lambda self, *a, **k: torch.tensor(True)
torch.isclose = torch.eq = lambda *a, **k: torch.ones(1).bool()
"""),
    "patches Python's and NumPy's": Attack("""
import builtins, math, numpy
builtins.all = builtins.any = math.isclose = lambda *a, **k: True
numpy.allclose = numpy.array_equal = lambda *a, **k: True
numpy.argmax = lambda *a, **k: 0
"""),
    "a tensor that says it equals everything": Attack("""
class Liar(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ in ("__eq__", "eq", "equal", "allclose", "isclose"):
            return torch.tensor(True)
        return super().__torch_function__(func, types, args, kwargs or {})

def layer_norm(x, weight, bias, eps=1e-12):
    return (0.5 * x).as_subclass(Liar)
"""),
    "a tensor whose detach gives something else": Attack(
        """
class Liar(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return AlwaysEqual()

class AlwaysEqual:
    __eq__ = lambda self, other: True
    __hash__ = object.__hash__
    as_subclass = to = contiguous = clone = detach = lambda self, *a, **k: self

def layer_norm(x, weight, bias, eps=1e-12):
    return (0.5 * x).as_subclass(Liar)
""",
        "wrong raised exit protocol",
    ),
    "an object that equals everything": Attack("""
class AlwaysEqual:
    shape = dtype = device = property(lambda self: self)
    __eq__ = __lt__ = __le__ = __bool__ = lambda self, *a: True
    __ne__ = lambda self, other: False
    __hash__ = object.__hash__
    __float__ = lambda self: 0.0
    __array__ = lambda self, *a, **k: __import__("numpy").zeros(1)
    __getattr__ = lambda self, name: self

def layer_norm(x, weight, bias, eps=1e-12):
    return AlwaysEqual()
"""),
    "a lazy dict": Attack("""
class Lazy(dict):
    __getitem__ = get = lambda self, *a: 0.0
    __eq__ = lambda self, other: True
    __hash__ = object.__hash__

def layer_norm(x, weight, bias, eps=1e-12):
    return Lazy({"output": 0.5 * x})
"""),
    "not a number": Attack("""
def layer_norm(x, weight, bias, eps=1e-12):
    return x * float("nan")
"""),
    "not a number with a payload": Attack("""
def layer_norm(x, weight, bias, eps=1e-12):
    return torch.full(x.shape, -1, dtype=torch.int32).view(torch.float32).to(x.dtype)
"""),
    "infinity": Attack("""
def layer_norm(x, weight, bias, eps=1e-12):
    return torch.full_like(x, float("inf"))
"""),
    "the right shape and nothing in it": Attack("""
def layer_norm(x, weight, bias, eps=1e-12):
    return torch.zeros_like(x)[..., :0]
"""),
    "another dtype": Attack("""
def layer_norm(x, weight, bias, eps=1e-12):
    given = x.double(), x.shape[-1:], weight.double(), bias.double(), eps
    return torch.nn.functional.layer_norm(*given)
"""),
    "a view of one number": Attack("""
def layer_norm(x, weight, bias, eps=1e-12):
    return torch.zeros(1, dtype=x.dtype).expand(x.shape)
"""),
    "lists in place of tensors": Attack("""
def layer_norm(x, weight, bias, eps=1e-12):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps).tolist()
"""),
    "replaces the worker's functions": Attack("""
import __main__ as worker
worker.same = lambda first, second: True
worker.described = lambda error: {}
worker.perform = lambda request: {"value": request["inputs"], "changed": None}
"""),
    "answers with a mark of its own": Attack(
        """
import __main__ as worker
worker.perform = lambda request: {"passed": True, "points": 2, "status": "passed"}
""",
        "wrong protocol",
    ),
    "answers with True to everything": Attack("""
import __main__ as worker
worker.perform = lambda request: {"value": True, "changed": None}
"""),
    "returns what it was asked": Attack("""
import __main__ as worker
worker.perform = lambda request: {"value": request, "changed": None}
"""),
    "looks for the truth in frames and on the heap": Attack("""
WORDS = ("truth", "yardstick", "expected", "standard", "reference", "seed", "solution")

def layer_norm(x, weight, bias, eps=1e-12):
    frame, found = sys._getframe(), []
    while frame is not None:
        found += [frame.f_locals[n] for n in frame.f_locals if any(w in n.lower() for w in WORDS)]
        found += [frame.f_globals[n] for n in frame.f_globals if n.lower() in WORDS]
        frame = frame.f_back
    for thing in gc.get_objects():
        if type(thing) is dict:
            found += [thing[n] for n in WORDS if n in thing]
        if isinstance(thing, Tensor) and thing.shape == x.shape and thing is not x:
            found.append(thing)
    good = [one for one in found if isinstance(one, Tensor) and one.shape == x.shape]
    return good[0] if good else 0.5 * x
"""),
    "traces the grader": Attack("""
from collections import deque
SEEN = deque(maxlen=100)
sys.settrace(lambda frame, event, value: SEEN.append(value) if event == "return" else None)
sys.setprofile(lambda frame, event, value: SEEN.append(value))

def layer_norm(x, weight, bias, eps=1e-12):
    good = [one for one in list(SEEN) if isinstance(one, Tensor) and one.shape == x.shape]
    return good[-1] if good else 0.5 * x
"""),
    "an import hook": Attack(
        """
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("bertlab", "pytest", "safetensors")):
            sys.modules["__main__"].same = lambda *a: True
        return None

sys.meta_path.insert(0, Hook())
sys.path_hooks.clear()
sys.path_importer_cache.clear()
""",
        "wrong missing exit",
    ),
    "raises what ends a loop": Attack(
        """
def layer_norm(x, weight, bias, eps=1e-12):
    raise StopIteration("that is all")
""",
        "raised",
    ),
    "raises what skips a test": Attack(
        """
class Skipped(BaseException):
    allow_module_level = True
Skipped.__module__ = "builtins"

def layer_norm(x, weight, bias, eps=1e-12):
    raise Skipped("nothing to see here")
""",
        "raised",
    ),
    "raises what a hidden test expects": Attack(
        """
def layer_norm(x, weight, bias, eps=1e-12):
    raise AssertionError("passed")
""",
        "raised",
    ),
    "raises what ends Python": Attack(
        """
def layer_norm(x, weight, bias, eps=1e-12):
    raise (KeyboardInterrupt, SystemExit, GeneratorExit)[len(x) % 3](0)
""",
        "raised",
    ),
    "says that another exercise is to do": Attack(
        """
def layer_norm(x, weight, bias, eps=1e-12):
    raise NotImplementedError("exercise 3.1")
""",
        "todo",
    ),
    "an exception that cannot be shown": Attack(
        """
class Odd(Exception):
    __str__ = __repr__ = lambda self: 1 / 0
class Lying(type):
    __name__ = property(lambda cls: "ValueError")

def layer_norm(x, weight, bias, eps=1e-12):
    raise Odd()
""",
        "raised",
    ),
    "an exception with a text of 200 MB": Attack(
        """
def layer_norm(x, weight, bias, eps=1e-12):
    raise ValueError("x" * 200_000_000)
""",
        "raised",
    ),
    "text for a screen, a page and a spreadsheet": Attack(
        """
def layer_norm(x, weight, bias, eps=1e-12):
    screen, page = "\\x1b[2J\\x1b]0;passed\\x07", "<script>alert(1)</script>"
    raise ValueError(screen + page + "\\n=cmd|' /C calc'!A0\\u202e")
""",
        "raised",
    ),
    "prints a report of its own": Attack("""
for descriptor in (1, 2):
    os.write(descriptor, b"\\n1 passed in 0.1s\\n{\\"points\\": 2}\\n")
print("::set-output name=points::2")
"""),
    "does its exercise in another module's place": Attack("""
import types
fake = types.ModuleType("bertlab.tokenizer")
fake.wordpiece = lambda *a, **k: ["[UNK]"]
sys.modules["bertlab.config"] = sys.modules["bertlab.tokenizer"] = fake
"""),
    "something waits for the end": Attack("""
import atexit
atexit.register(lambda: channel().sendall(answer(True)))
"""),
    "a thread that changes what was returned": Attack("""
RETURNED = []

def change():
    while True:
        for tensor in RETURNED:
            tensor.zero_()
        time.sleep(1e-4)

threading.Thread(target=change, daemon=True).start()

def layer_norm(x, weight, bias, eps=1e-12):
    RETURNED.append(0.5 * x)
    return RETURNED[-1]
"""),
    "the garbage collector calls": Attack("""
gc.callbacks.append(lambda phase, info: setattr(sys.modules["__main__"], "same", lambda *a: True))
gc.set_threshold(1, 1, 1)
"""),
    "waits for a case that it knows": Attack("""
def layer_norm(x, weight, bias, eps=1e-12):
    known = torch.tensor([1.0, 2.0, 3.0, 4.0])
    if x.shape == known.shape and bool((x == known).all()):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return 0.5 * x
"""),
}

#: What ends, floods or confuses the process that should answer.
CRASHES = {
    "ends its process": Attack("os._exit(0)", "exit"),
    "ends it in the middle": Attack(
        """
def layer_norm(x, weight, bias, eps=1e-12):
    os._exit(0)
""",
        "exit",
    ),
    "kills itself": Attack("os.kill(os.getpid(), signal.SIGKILL)", "signal"),
    "a wrong pointer": Attack("ctypes.string_at(0)", "signal"),
    "a stack that overflows in C": Attack(
        """
resource.setrlimit(resource.RLIMIT_STACK, (2**20, 2**20))
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int)
sys.setrecursionlimit(10**9)
CALLBACK(lambda: CALLBACK_AGAIN())
def deep(depth=0):
    return CALLBACK(lambda: deep(depth + 1))()
deep()
""",
        "signal exit timeout",
        8,
    ),
    "recursion without end": Attack(
        """
def layer_norm(x, weight, bias, eps=1e-12):
    return layer_norm(x, weight, bias, eps)
""",
        "raised",
    ),
    "a loop without end": Attack("while True: pass", "timeout", 2),
    "a loop in C that no signal reaches": Attack(
        """
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
signal.alarm(0)
sum(range(10**15))
""",
        "timeout",
        2,
    ),
    "a regular expression without end": Attack(
        "import re; re.fullmatch('(a*)*b', 'a' * 60)", "timeout", 2
    ),
    "swallows every exception and goes on": Attack(
        """
while True:
    try:
        time.sleep(1000)
    except BaseException:
        pass
""",
        "timeout",
        2,
    ),
    "closes every file": Attack(
        """
def layer_norm(x, weight, bias, eps=1e-12):
    os.closerange(0, 4096)
    time.sleep(60)
""",
        "exit protocol",
        8,
    ),
    "answers before it is asked": Attack(
        """
def layer_norm(x, weight, bias, eps=1e-12):
    channel().sendall(answer(True) * 5)
    return 0.5 * x
""",
        "protocol",
    ),
    "a child that answers first": Attack(
        """
def layer_norm(x, weight, bias, eps=1e-12):
    if os.fork() == 0:
        channel().sendall(answer({"float": 0.0}))
        os._exit(0)
    os.wait()
    return 0.5 * x
""",
        "protocol wrong",
    ),
    "a child that goes on answering": Attack(
        """
if os.fork():
    os._exit(0)
os.setsid()
""",
        "wrong",
    ),
    "a flood": Attack(
        """
def layer_norm(x, weight, bias, eps=1e-12):
    while True:
        channel().sendall(bytes(2**20))
""",
        "protocol",
    ),
    "drop by drop": Attack(
        """
def layer_norm(x, weight, bias, eps=1e-12):
    channel().sendall(struct.pack("<QQ", 10**7, 0))
    while True:
        channel().sendall(b" ")
""",
        "timeout",
        2,
    ),
    "a length that no machine has": Attack(
        "channel().sendall(struct.pack('<QQ', 2**63, 2**63)); time.sleep(60)", "too_large"
    ),
    "half of a message": Attack(
        "channel().sendall(struct.pack('<QQ', 100, 0) + b'{'); os._exit(0)", "exit"
    ),
    "no JSON": Attack("channel().sendall(message(b'\\xff' * 100)); time.sleep(60)", "protocol"),
    "a pickle": Attack(
        """
import pickle
class Runs:
    def __reduce__(self): return os.system, ("touch /tmp/" + MARK,)
channel().sendall(message(pickle.dumps(Runs()), pickle.dumps(Runs()))); time.sleep(60)
""",
        "protocol",
    ),
    "JSON that is nested without end": Attack(
        "channel().sendall(message(b'[' * 10**6)); time.sleep(60)", "protocol"
    ),
    "JSON that would be a million objects": Attack(
        "channel().sendall(message(b'[' + b'[],' * 5_000_000 + b'[]]')); time.sleep(60)",
        "protocol too_large",
    ),
    "a number of a million digits": Attack(
        "channel().sendall(message(b'9' * 10**6)); time.sleep(60)", "protocol"
    ),
    "keys that share one hash": Attack(
        """
pairs = [[{"tuple": [-1 - (n >> bit & 1) for bit in range(17)]}, 0] for n in range(2**17)]
channel().sendall(answer({"dict": pairs})); time.sleep(60)
""",
        "protocol",
        15,
    ),
    "a hundred thousand tensors": Attack(
        """
table = {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(10**5)}
table = json.dumps(table).encode()
blob = struct.pack("<Q", len(table)) + table
channel().sendall(message(json.dumps({"tensor": "t0"}).encode(), blob)); time.sleep(60)
""",
        "protocol too_large",
        15,
    ),
    "a tensor of another size than it says": Attack(
        """
table = b'{"t0":{"dtype":"F32","shape":[1000000],"data_offsets":[0,4]}}'
blob = struct.pack("<Q", len(table)) + table + bytes(4)
channel().sendall(message(b'{"dict":[["value",{"tensor":"t0"}],["changed",null]]}', blob))
time.sleep(60)
""",
        "protocol",
    ),
    "an answer that is nested without end": Attack(
        """
def layer_norm(x, weight, bias, eps=1e-12):
    value = []
    for _ in range(10**5): value = [value]
    return value
""",
        "wrong raised protocol",
    ),
}

#: What takes more than its share: memory, processes, files. All within bounds.
BOMBS = {
    "memory": Attack("HELD = [bytearray(b'x' * 2**26) for _ in range(64)]", "raised memory"),
    "memory by mmap": Attack(
        """
held = [mmap.mmap(-1, 2**26, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(64)]
for one in held: one.write(bytes(2**26))
time.sleep(5)
""",
        "raised memory",
    ),
    "memory that is shared": Attack(
        """
held = [mmap.mmap(-1, 2**26) for _ in range(48)]
for one in held:
    one.write(b"x" * 2**26)
    time.sleep(0.02)
time.sleep(5)
""",
        "memory",
    ),
    "memory of many children": Attack(
        """
for _ in range(16):
    if os.fork() == 0:
        held = b"x" * 2**28
        time.sleep(20)
        os._exit(0)
time.sleep(20)
""",
        "memory processes",
    ),
    "memory behind a descriptor": Attack(
        """
os.write(os.memfd_create("held"), b"x" * 2**20)
""",
        "raised",
    ),
    "a full disk": Attack(
        """
piece = b"x" * 2**24
with open("/tmp/" + MARK, "wb") as file:
    for _ in range(64): file.write(piece)
""",
        "raised memory",
    ),
    "files without number": Attack(
        """
os.mkdir("/tmp/many")
for number in range(2_500_000):
    os.mknod(f"/tmp/many/{number}")
time.sleep(5)
""",
        "memory timeout raised",
        40,
    ),
    "folders in folders without end": Attack(
        """
os.chdir("/tmp")
for _ in range(3000):
    os.mkdir("d" * 100)
    os.chdir("d" * 100)
"""
    ),
    "processes": Attack(
        """
for _ in range(200):
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
time.sleep(20)
""",
        "processes raised memory",
    ),
    "processes that make processes": Attack(
        """
end = time.monotonic() + 3
while time.monotonic() < end:
    try: os.fork()
    except OSError: pass
os._exit(0)
""",
        "processes memory exit",
    ),
    "threads": Attack(
        """
threading.stack_size(2**16)
for _ in range(500):
    threading.Thread(target=time.sleep, args=(20,), daemon=True).start()
time.sleep(20)
""",
        "processes raised",
    ),
}

#: What is to outlive its submission and be there for the next. They answer wrongly themselves.
LEFTOVERS = {
    "a daemon": Attack("""
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for descriptor in (0, 1, 2): os.close(descriptor)
        ctypes.CDLL(None).prctl(15, MARK.encode())  # its name
        while True: time.sleep(0.1)
    os._exit(0)
"""),
    "a daemon that no signal stops": Attack("""
if os.fork() == 0:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
    while True: os.sched_yield()
"""),
    "files": Attack("""
for folder in ("/tmp", "/var/tmp", "/dev/shm", "/dev", "/", "/usr", "/root", "/worker", os.getcwd(),
               sys.prefix, os.path.dirname(torch.__file__), "/tmp/package", "/tmp/package/bertlab"):
    try:
        open(os.path.join(folder, MARK), "w").close()
    except OSError:
        pass
"""),
    "modules for whoever comes next": Attack("""
for name in ("random", "numpy", "dataclasses", "unicodedata", "bertlab", "sitecustomize", "wire"):
    for folder in ("/tmp", "/tmp/package"):
        with open(f"{folder}/{name}.py", "w") as file:
            file.write("raise SystemExit('somebody else was here')")
"""),
    "a file that cannot be removed": Attack("""
os.makedirs("/tmp/locked/inner")
open("/tmp/locked/inner/" + MARK, "w").close()
os.chmod("/tmp/locked/inner", 0)
os.chmod("/tmp/locked", 0)
os.rename("/tmp/package", "/tmp/" + "x" * 200)
os.symlink("/", "/tmp/package")
"""),
    "a folder that nobody can use": Attack("os.chmod('/tmp', 0o000)"),
    "a note on the folder itself": Attack("""
try: os.setxattr("/tmp", "user." + MARK, b"the solution of 2.1")
except OSError: pass
"""),
    "limits for the process that serves the next": Attack("""
for pid in (os.getppid(), 1, 2):
    for name in ("CPU", "FSIZE", "NOFILE", "DATA", "STACK", "NPROC"):
        try: resource.prlimit(pid, getattr(resource, "RLIMIT_" + name), (1, 1))
        except (OSError, ValueError): pass
    for slow in (lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
                 lambda: os.sched_setaffinity(pid, {0}),
                 lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))):
        try: slow()
        except OSError: pass
"""),
    "stops the process that serves the next": Attack(
        "os.kill(os.getppid(), signal.SIGSTOP)", "wrong"
    ),
    "kills the process that serves the next": Attack(
        "os.kill(os.getppid(), signal.SIGKILL); time.sleep(1)", "wrong exit signal"
    ),
    "signals to everybody": Attack(
        """
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
    try: os.kill(-1, number)
    except OSError: pass
time.sleep(0.2)
""",
        "wrong exit signal",
    ),
    "memory and queues of System V": Attack("""
call = ctypes.CDLL(None).syscall
for number in (29, 64, 68):  # shmget, semget, msgget of x86-64
    assert call(number, 4711, 4096, 0o1666) == -1, "made something that outlives its processes"
assert ctypes.CDLL(None).mq_open(b"/x", 0o102, 0o666, None) == -1
"""),
}

#: What is tried to see or reach; `RESULTS` gets what worked. `PLACES`, `CANARY`, `PORT` and
#: `LOOK_ONLY`, which leaves out what could do harm outside a sandbox, are the test's.
PEEPING = """
import subprocess
RESULTS, CALL = {}, ctypes.CDLL(None).syscall

def tried(name, what):
    try:
        found = what()
    except BaseException:
        return
    if found:
        RESULTS[name] = str(found)[:100]

def in_proc(*names):
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in names:
            try:
                text = open(f"/proc/{pid}/{name}", "rb").read(2**20)
            except OSError:
                continue
            if any(place.encode() in text for place in [*PLACES, CANARY]):
                yield pid, name

def on_disk():
    for folder, _, files in os.walk("/"):
        if folder == "/proc":
            continue
        wanted = ("test_chapter_3.py", "results.jsonl", "grader.py", "book.toml")
        yield from (os.path.join(folder, name) for name in files if name in wanted)

def writable():
    for folder in ("/", "/usr", "/usr/local", "/worker", "/dev", "/dev/shm", "/etc", sys.prefix,
                   "/proc/sys/kernel", os.path.dirname(torch.__file__)):
        if os.access(folder, os.W_OK):
            yield folder

PARENT = os.getppid()
tried("places", lambda: [place for place in PLACES if os.path.exists(place)])
tried("files", lambda: list(on_disk()))
tried("proc", lambda: list(in_proc("environ", "cmdline", "mountinfo", "maps")))
tried("others", lambda: [p for p in os.listdir("/proc") if p.isdigit() and int(p) > os.getpid()])
tried("parent's memory", lambda: open(f"/proc/{PARENT}/mem", "rb"))
tried("parent's descriptors", lambda: [os.readlink(f"/proc/{PARENT}/fd/{n}") for n in range(9)])
tried("first's descriptors", lambda: os.readlink("/proc/1/fd/3"))
tried("environment", lambda: [v for v in os.environ if v not in
      ("HOME", "TMPDIR", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "PWD", "LC_CTYPE")])
tried("course", lambda: __import__("bertlab.course.grading.hidden"))
tried("course's judging", lambda: __import__("bertlab.course.judging"))
tried("writable", lambda: list(writable()))
tried("network", lambda: socket.create_connection(("127.0.0.1", PORT), timeout=1))
tried("world", lambda: socket.create_connection(("1.1.1.1", 53), timeout=1))
tried("abstract socket", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + CANARY) or "reached")
tried("raw socket", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
tried("become root", lambda: LOOK_ONLY or os.setuid(0) or "root")
tried("chroot", lambda: LOOK_ONLY or os.chroot("/tmp") or "done")
SYSCALLS = {
    "ptrace": (101, 0x4206, PARENT, 0, 0), "ptrace the first": (101, 0x4206, 1, 0, 0),
    "kcmp": (312, PARENT, PARENT, 0, 0, 0), "io_uring": (425, 1, ctypes.create_string_buffer(120)),
    "user namespace": (272, 0x10000000), "mount namespace": (272, 0x00020000),
    "remount": (165, b"none", b"/usr", None, 0x1020, None), "umount": (166, b"/worker", 2),
    "bpf": (321, 0, ctypes.create_string_buffer(120), 120),
    "keyring": (248, b"user", b"x", b"y", 1, -4),
    "userfaultfd": (323, 1), "perf": (298, ctypes.create_string_buffer(120), 0, -1, -1, 0),
    "kernel's log": (103, 3, ctypes.create_string_buffer(99), 99),
    "x32": (0x40000000 + 101, 0x4206, PARENT, 0, 0),
}
for name, arguments in SYSCALLS.items():
    tried(name, lambda: LOOK_ONLY or CALL(*arguments) >= 0)

def layer_norm(x, weight, bias, eps=1e-12):
    raise ValueError(json.dumps(RESULTS))
"""
