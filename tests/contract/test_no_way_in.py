"""What our own code may call, import and name: nothing that runs, or opens, what others wrote."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

BANNED_CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "yaml.load", "np.load",
    "numpy.load", "pd.read_pickle", "tempfile.mktemp", "subprocess.getoutput", "subprocess.getstatusoutput",
}  # fmt: skip
BANNED_MODULES = {
    "pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "yaml", "csv", "xmlrpc", "socketserver",
    "http.server", "telnetlib", "ftplib",
}  # fmt: skip
BANNED_NAMES = {"parse_expr", "sympify", "allow_pickle", "load_extension"}
LISTENERS = {"listen", "create_server", "start_server", "HTTPServer", "serve_forever"}
MAY = {
    # On 127.0.0.1, for the moment in which the sandbox must not reach it; what `trew serve` is for, with a token; the
    # store by which the process group of an update finds together (cluster.sync = "nccl").
    "listener": {"rewards/sandbox/choose.py", "utils/listening.py", "rollout/vllm/stream.py"},
    "dynamic import": {
        "__init__.py",
        "cli/completion.py",
        "cli/main.py",
        "data/hub.py",
        "env/adapters/__init__.py",
        "rewards/__init__.py",
        "rewards/isolation/boot.py",
        "models/backends.py",
        "utils/posix.py",
    },  # names of our own modules, commands, workers, backends and extras, and of the standard library
    "file import": {
        "rewards/isolation/task_process.py",
        "utils/user_files.py",
        "rewards/sandbox/inside.py",
    },
    "temporary place": {"rewards/sandbox/host/boxes.py", "rewards/sandbox/host/stage.py"},  # inside a box
}


def dangers(source: str) -> list[str]:
    """What in a file of ours would be a way in; ``kind: place`` where some files may."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [name for name in names for b in BANNED_MODULES if name == b or name.startswith(b + ".")]
            found += ["listener" for name in names if name.partition(".")[0] == "uvicorn"]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            last = called.rpartition(".")[2]
            found += [called] if called in BANNED_CALLS else []
            found += ["listener"] if last in LISTENERS else []
            if last == "import_module" and not isinstance(node.args[0], ast.Constant):
                found.append("dynamic import")
            found += ["file import"] if last in ("spec_from_file_location", "exec_module", "run_path") else []
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = node.id if isinstance(node, ast.Name) else node.attr
            found += [name] if name in BANNED_NAMES else []
        if isinstance(node, ast.keyword):
            value = node.value.value if isinstance(node.value, ast.Constant) else None
            found += [f"{node.arg}={value}"] if (node.arg, value) in (("shell", True), ("weights_only", False)) else []
            found += [node.arg] if node.arg in BANNED_NAMES else []
            found += ["trust_remote_code"] if node.arg == "trust_remote_code" and value is not False else []
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += ["temporary place"] if re.match(r"/(tmp|var/tmp)\b", node.value) else []
            found += [node.value] if node.value in ("0.0.0.0", "::") else []
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from dill import loads", "eval('1')", "torch.load(f)", "os.system('x')", "import yaml",
        "subprocess.run('x', shell=True)", "f.from_pretrained(x, trust_remote_code=True)", "import csv", "s.listen()",
        "np.load(f, allow_pickle=True)", "f.from_pretrained(x, trust_remote_code=flag)", "sympy.parse_expr(x)",
        "from p import parse_expr as p; p.parse_expr", "open('/tmp/state')", "s.bind(('0.0.0.0', 80))",
        "importlib.import_module(name)", "import uvicorn",
        "load(f, weights_only=False)", "exec(code)", "tempfile.mktemp()", "spec.loader.exec_module(m)",
    ],
)  # fmt: skip
def test_the_gate_sees(source):
    assert dangers(source)


def test_no_way_in_by_our_own_code():
    found = {str(path.relative_to(ROOT / "src" / "trew")): dangers(path.read_text()) for path in SOURCES}
    refused = [
        (name, danger) for name, dangerous in found.items() for danger in dangerous if name not in MAY.get(danger, ())
    ]
    assert refused == []


def test_every_loader_of_transformers_is_told_not_to_run_code():
    """Tokenizers and configurations too: the default is not relied on."""
    calls = 0
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained"):
                if any(k.arg == "gguf_file" for k in node.keywords):  # a file whose hash is checked
                    continue
                if ast.unparse(node.func).startswith("peft."):  # adapters for a model that is loaded: it has no code
                    continue
                calls += 1
                told = {k.arg: k.value for k in node.keywords}
                assert "trust_remote_code" in told, f"{path}:{node.lineno}"
    assert calls >= 5


def test_versions_are_exact_and_above_the_known_holes():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][\w.+!-]*( *;.*)?", line) for line in lines)
    floors = (ROOT / "pyproject.toml").read_text()
    for need in ("torch>=2.10", "transformers>=5.3", "jinja2>=3.1.6"):
        assert f'"{need}"' in floors
