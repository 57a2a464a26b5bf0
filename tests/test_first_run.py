"""scripts/gpu/first_run.sh: its stages on a CPU, how they depend on each other, what it says of a node, and its end."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from documented_commands import Checkout, Command
from e2e_world import ENV

from verl.config import check_supported, load_config_from_argv
from verl.config.rules.predicates import trajectories_per_step
from verl.trainer.dry_run import main as dry_run

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "scripts" / "gpu"), str(ROOT / "scripts" / "experiments")]
from first_run import check_nodes, node, nvidia, published, stages, training  # noqa: E402
from first_run.__main__ import numbers_of  # noqa: E402
from first_run.report import write_report  # noqa: E402
from first_run.result import Outcome, Result, judged, skipped  # noqa: E402
from first_run.site import Site, StageError  # noqa: E402
from first_run.stages import STAGES, Stage, run_stages  # noqa: E402

SCRIPT = ("bash", str(ROOT / "scripts" / "gpu" / "first_run.sh"), "--device", "cpu")
NVIDIA_SMI = """#!/usr/bin/env bash
case "$1" in
  --query-gpu=*)
    echo "0, GPU-aa-1, NVIDIA H100 80GB HBM3, 580.65.06, 81559, 4, 0, Disabled, Default"
    echo "1, GPU-bb-2, NVIDIA H100 80GB HBM3, 580.65.06, 81559, 61000, 97, Disabled, Default"
    echo "2, GPU-cc-3, NVIDIA H100 80GB HBM3, 580.65.06, 81559, 4, 0, Disabled, Default" ;;
  --query-compute-apps=*) echo "GPU-bb-2, 4242, python, 60990" ;;
  topo) echo "GPU0 GPU1 NV18" ;;
  -L)
    echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aa-1)"
    echo "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bb-2)"
    echo "  MIG 3g.40gb     Device  0: (UUID: MIG-11-aa)"
    echo "  MIG 3g.40gb     Device  1: (UUID: MIG-22-bb)" ;;
esac
"""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (tmp_path / "logs").mkdir()
    (tmp_path / "scratch").mkdir()
    return Site(tmp_path, "cpu", 2, "7b", tmp_path / "scratch", "01")


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return program


def fake(number: int, outcome: Outcome, *needs: int, **more: object) -> Stage:
    return Stage(number, f"stage {number}", lambda _: Result(outcome, "found"), needs, **more)  # type: ignore[arg-type]


def outcomes(monkeypatch: pytest.MonkeyPatch, site: Site, numbers: list[int], *given: Stage) -> dict[int, Result]:
    monkeypatch.setattr(stages, "STAGES", given)
    return {stage.number: result for stage, result in run_stages(site, numbers)}


def test_a_failure_stops_only_what_needs_it(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    given = [fake(1, Outcome.FAIL), fake(2, Outcome.PASS), fake(3, Outcome.PASS, 1), fake(4, Outcome.PASS, 2, 3)]
    found = outcomes(monkeypatch, site, [1, 2, 3, 4], *given)
    assert [found[i].outcome for i in (1, 2, 3, 4)] == ["FAIL", "PASS", "SKIP", "SKIP"]
    assert found[3].figures == "stage 1, which it needs, failed"
    assert found[4].figures == "stage 3, which it needs, did not run"


def test_what_this_machine_cannot_have_stops_nothing(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    impossible = [fake(1, Outcome.PASS, least_devices=4), fake(2, Outcome.PASS, needs_cuda="why")]
    others = [fake(3, Outcome.PASS, 1, 2), fake(4, Outcome.PASS)]
    found = outcomes(monkeypatch, site, [1, 2, 3], *impossible, *others)
    assert found[1].figures == "needs 4 GPUs, this node shows 2" and found[2].figures == "needs CUDA: why"
    assert found[3].outcome == "PASS" and found[4].figures == "not asked for (--stages)"


def test_a_stage_that_raises_has_failed(monkeypatch: pytest.MonkeyPatch, site: Site) -> None:
    def run(_: Site) -> Result:
        raise StageError("the reason")

    found = outcomes(monkeypatch, site, [1, 2], Stage(1, "raises", run), fake(2, Outcome.PASS))
    assert found[1].outcome == "FAIL" and found[1].figures == "the reason" and found[2].outcome == "PASS"


def test_sizes_above_the_largest_are_not_asked_for() -> None:
    def skipped_at(size: str) -> list[int]:
        site = Site(Path(), "cuda", 8, size, Path(), num_nodes=2)
        return [stage.number for stage in STAGES if stages.why_not(stage, site, range(1, 12))]

    found = {size: skipped_at(size) for size in stages.SIZES}
    assert found == {"tiny": [9, 10], "3b": [10], "7b": []}
    assert [stage.number for stage in STAGES] == list(range(1, 12))
    assert numbers_of("1-3,7") == [1, 2, 3, 7]


NCCL_LINES = """node1:4242:4300 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
node1:4242:4300 [0] NCCL INFO Using network IB
node1:4242:4301 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/IB/0/GDRDMA
node1:4242:4301 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
"""


def test_the_transport_is_that_of_nccl_s_channels_to_other_nodes() -> None:
    assert check_nodes.transports_in(NCCL_LINES) == {"NET/IB/GDRDMA"}
    assert check_nodes.transports_in(NCCL_LINES.replace("NET/IB/0/GDRDMA", "NET/Socket/1")) == {"NET/Socket"}
    assert check_nodes.transports_in(NCCL_LINES.split("Using network")[0]) == {"NET/IB"}
    assert check_nodes.transports_in("4242 [0] NCCL INFO NET/OFI Using Libfabric version 1.22\n") == {"NET/OFI"}
    assert check_nodes.transports_in("") == set()


def test_several_nodes_are_checked_only_when_they_are_named(site: Site) -> None:
    stage = STAGES[-1]
    assert stage.name == "all-reduce between nodes"
    refused = stages.why_not(stage, site, [11])
    assert refused is not None and refused.figures == "needs a Ray cluster: --nodes 2 or more, with RAY_ADDRESS"
    site.num_nodes = 2
    assert stages.why_not(stage, site, [11]) is None


def test_a_program_that_fails_or_hangs(site: Site) -> None:
    with pytest.raises(StageError, match=r"job ended with status 3: ValueError: that \(logs/01_job.log\)"):
        site.run("job", ["bash", "-c", "echo start; echo ValueError: that; echo errored: 0; exit 3"], 60)
    hangs = ["sleep", "617"]  # no other test has such a child
    with pytest.raises(StageError, match=r"hung was ended after \d+ s"):
        site.run("hung", hangs, 0.2)
    assert not [child for child in psutil.Process().children() if child.cmdline() == hangs]


def test_what_the_node_says(site: Site, nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.device = "cuda"
    monkeypatch.setattr(node, "host_problems", lambda on_gpu: iter(()))
    taken = node.look(site)
    assert taken.outcome == "FAIL"
    assert taken.figures == (
        "GPU 1 has 60 GiB in use by python (pid 4242); CUDA_VISIBLE_DEVICES=0,2 leaves the free ones"
    )
    assert "| yes | 59.6 | 79.6 | 97 | Disabled | Default | python (pid 4242, 60990 MiB) |" in taken.details
    assert "NV18" in taken.details and "NV18" in site.log("topology").read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-cc")
    free = node.look(site)
    assert free.outcome == "PASS" and free.figures.startswith("2 of 3 GPUs visible, driver 580.65.06")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES=7 names no GPU of this node" in node.look(site).figures


def test_slices_of_a_gpu_and_gpus_for_one_process_are_told_apart(
    site: Site, nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them would end later: as no GPU, as an error of NCCL, or as "all CUDA-capable devices are busy"."""
    site.device = "cuda"
    monkeypatch.setattr(node, "host_problems", lambda on_gpu: iter(()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-22-bb")
    found = node.look(site)
    assert found.outcome == "FAIL" and "MIG-22-bb names MIG slices of GPU 1; a run needs whole GPUs" in found.figures
    assert "names no GPU" not in found.figures
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-of-another-node")
    assert "names MIG slices; a run needs whole GPUs" in node.look(site).figures

    def with_modes(mig: str, compute_mode: str) -> str:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        nvidia_smi.write_text(NVIDIA_SMI.replace("4, 0, Disabled, Default", f"4, 0, {mig}, {compute_mode}"))
        return node.look(site).figures

    assert "GPU 0 is in MIG mode; a run needs whole GPUs" in with_modes("Enabled", "Default")
    exclusive = with_modes("Disabled", "Exclusive_Process")
    assert "compute mode Exclusive_Process, in which one process at a time can use it" in exclusive
    assert "trainer and engine are processes that share it (its owner: nvidia-smi -i 0 -c DEFAULT)" in exclusive
    assert "GPU 0 is in compute mode Prohibited" in with_modes("Disabled", "Prohibited")
    assert with_modes("[N/A]", "Default").startswith("1 of 3 GPUs visible")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_report_names_what_the_engine_s_process_failed_with(
    site: Site, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own error only says that the cause is above."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "scripts" / "gpu"), *sys.path[-1:], str(ROOT)]))
    model = Path(shutil.copytree(tiny_model_dir, tmp_path / ("model_" * 30)))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    site.stage = "05"
    stage = Stage(5, "sampler and sync", lambda site: site.child("check_sampler", "--model", str(model), limit_s=500))
    result = stages.timed(stage, site)
    assert result.outcome == "FAIL" and "vLLM says: " in result.figures and "SafetensorError" in result.figures
    assert "SafetensorError" in write_report(site, [(stage, result)], "complete").read_text().split("Last lines")[0]


def test_an_old_driver_and_none(site: Site, nvidia_smi: Path) -> None:
    nvidia_smi.write_text(NVIDIA_SMI.replace("580.65.06", "535.1"))
    found = "".join(node.gpu_problems(nvidia.gpus(), nvidia.gpus(), []))
    assert "the driver is 535.1, CUDA 13 needs 580 or newer; there is no lock for CUDA 12" in found
    nvidia_smi.write_text("#!/usr/bin/env bash\nexit 9\n")
    assert nvidia.gpus() == [] and "finds no GPU" in "".join(node.gpu_problems([], [], []))


def test_a_large_model_needs_room(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(free_gib: int, memory_gib: int) -> str | None:
        monkeypatch.setattr(published.shutil, "disk_usage", lambda _: SimpleNamespace(free=free_gib * 2**30))
        return published.what_lacks(site.scratch, "7b", memory_gib * 2**30)

    assert lacking(200, 500) is None
    assert lacking(200, 100) == "needs 212 GiB of host memory, 100 are available"
    assert lacking(50, 500) == f"needs 127 GiB of disk, {site.scratch} has 50: --scratch ANOTHER_FOLDER"


@pytest.mark.parametrize("num_devices", [1, 8])
def test_the_script_takes_the_settings_for_gpus(num_devices: int, site: Site, tmp_path: Path) -> None:
    """Which no run on a CPU composes."""
    site.device, site.num_devices = "cuda", num_devices
    model, world = tmp_path / "model", tmp_path / "world"
    site._made["tinywiki_data"] = world
    for file in (world / "train.parquet", world / "test.parquet", model / "config.json"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    settings = published.settings_of(site, tmp_path / "run", "http://127.0.0.1:8000/retrieve")
    variables = published.variables_of(site, model, "verl.trainer.main_ppo")
    call = Checkout(tmp_path).rehearse(Command("here", ("bash", "train_grpo.sh", *settings), variables))[-1]
    config = load_config_from_argv(call.arguments)
    check_supported(config)
    actor = config.actor_rollout_ref.actor
    assert (config.data.train_batch_size, config.trainer.n_gpus_per_node) == (8 * num_devices, num_devices)
    assert trajectories_per_step(config) == 40 * num_devices and actor.ppo_micro_batch_size == 8 * num_devices
    assert actor.fsdp_config.optimizer_offload and config.actor_rollout_ref.model.path == str(model)
    assert config.trainer.total_training_steps == 2 and not config.trainer.val_before_train


def test_the_report_has_every_stage_and_the_log_of_what_failed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret123")
    site.log("job").write_text("one\nError: hf_verysecret123\n")
    found = [(STAGES[0], judged(False, "broken | by hf_verysecret123", "| a |\n|---|")), (STAGES[1], skipped("why"))]
    text = write_report(site, found, "under way").read_text()
    assert "| 1 | node | FAIL | 0 | broken / by *** |" in text and "| 2 | torch | SKIP | 0 | why |" in text
    assert "| 10 | train_grpo.sh, 7B shape | | | not reached |" in text
    assert "Last lines of logs/01_job.log" in text and "Error: ***" in text and "verysecret" not in text


def metrics(folder: Path, **changed: float) -> Path:
    row = {"timing_s/step": 9.0, "timing_s/weight_sync": 0.5, "timing_per_token_ms/gen": 0.5, "env/failed_ratio": 0.0}
    row |= {"timing_per_token_ms/update_actor": 0.25, training.MISMATCH: 1e-3, "memory_gib/update/device": 30.5}
    row |= {"memory_gib/update/actor": 20.25, "env/number_of_valid_search": 0.5} | changed
    folder.mkdir()
    lines = [json.dumps({"step": step, "time": 0} | row) for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


PREDICTED = training.Prediction(True, "ok   fits", {"update": 29.0})


def test_a_sound_run(tmp_path: Path) -> None:
    found = training.judge_run(metrics(tmp_path / "run"), PREDICTED, searches=True)
    assert found.outcome == "PASS" and found.figures.startswith("2000 tokens/s sampled, 4000 trained, 9.0 s a step")
    assert "| update | 30.50 | 29.00 | 20.25 |" in found.details and "| sample | - | - | - |" in found.details


@pytest.mark.parametrize(
    "changed, message",
    [
        ({training.MISMATCH: 0.3}, "step 1: sampler and trainer disagree by 0.3 nats on average"),
        ({"env/failed_ratio": 0.25}, "25% of the trajectories of step 1 failed"),
        ({"env/number_of_valid_search": 0.0}, "nothing was searched for"),
        ({"actor/grad_norm": float("nan")}, "actor/grad_norm of step 1 is not finite"),
    ],
)
def test_an_unsound_run(tmp_path: Path, changed: dict[str, float], message: str) -> None:
    found = training.judge_run(metrics(tmp_path / "run", **changed), PREDICTED, searches=True)
    assert found.outcome == "FAIL" and message in found.figures and "30.50" in found.details


def test_what_a_dry_run_prints_is_understood(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [f"actor_rollout_ref.model.path={tiny_model_dir}", "actor_rollout_ref.rollout.n_agent=2"]
    settings += ["algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=2", "--gpus", "2x80"]
    assert dry_run(settings) == 0
    found = training.understood(capsys.readouterr().out)
    assert found.fits and "fits: " in found.words and set(found.gib) == {"sample", "score", "update", "sync"}
    assert max(found.gib, key=lambda phase: found.gib[phase]) == "sample" and 40 < found.gib["sample"] < 41
    with pytest.raises(StageError, match="the dry run says: FAIL config: no such key"):
        training.understood("FAIL config: no such key\n")


def test_calls_that_only_a_gpu_reaches_fit_their_signatures() -> None:
    device = torch.device("cuda", 0)
    for function, arguments in {
        torch.cuda.can_device_access_peer: (0, 1),
        torch.cuda.get_device_properties: (device,),
        torch.cuda.mem_get_info: (device,),
        torch.cuda.synchronize: (device,),
        torch.cuda.nccl.version: (),
    }.items():
        inspect.signature(function).bind(*arguments)


def test_the_first_stages_on_a_cpu_and_a_folder_that_is_there(tmp_path: Path) -> None:
    command = (*SCRIPT, "--stages", "1-2", "--output_dir", str(tmp_path / "out"))
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "out" / "report.md").read_text()
    assert "complete" in text and "| 1 | node | PASS |" in text and "| 2 | torch | PASS |" in text
    assert done.stdout.splitlines()[-1].endswith("out/report.md")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["logs", "report.md"]
    again = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=600, check=False)
    assert again.returncode == 1 and "is there already" in again.stderr


def test_an_interrupt_ends_the_children_and_keeps_the_report(tmp_path: Path) -> None:
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background ignores it
    command = (*SCRIPT, "--stages", "1,3", "--output_dir", str(tmp_path / "out"))
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, text=True, preexec_fn=heeds) as process:
        try:
            interrupt_in_stage_3(process)
        finally:
            process.kill()
    text = (tmp_path / "out" / "report.md").read_text()
    assert "interrupted in stage 3" in text and "| 1 | node | PASS |" in text and "| 3 | all-reduce | | |" in text
    assert not list((tmp_path / "out").glob("first_run_*")), "the scratch folder is gone"


def interrupt_in_stage_3(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    while "all-reduce ..." not in process.stdout.readline():
        assert process.poll() is None
    family = psutil.Process(process.pid)
    deadline = time.monotonic() + 300
    while not (children := family.children(recursive=True)) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(timeout=300) == 130, rest
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive and "interrupted; what runs has been ended" in rest


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_stage_that_a_cpu_can_run_passes(tmp_path: Path) -> None:
    command = (*SCRIPT, "--output_dir", str(tmp_path / "out"))
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=1700, check=False)
    text = (tmp_path / "out" / "report.md").read_text()
    assert done.returncode == 0, done.stdout + text
    summary = text.split("\n## ")[0].splitlines()
    rows = [line.split("|") for line in summary if line.startswith("| ") and line[2].isdigit()]
    results = {int(row[1]): row[3].strip() for row in rows}
    assert results == dict.fromkeys(range(1, 10), "PASS") | {8: "SKIP", 10: "SKIP", 11: "SKIP"}, text
    for phase in ("score", "update"):
        assert f"| {phase} | - | " in text
    assert text.count("Dry run: ok") == 3 and text.count("| step | s | sampled tokens/s") == 3
