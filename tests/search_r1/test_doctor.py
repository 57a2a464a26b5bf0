"""What `search-r1 doctor` says of this installation, and of one that lacks something."""

from __future__ import annotations

import pytest

from search_r1 import doctor


@pytest.mark.timeout(900)
def test_this_installation_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    said = capsys.readouterr().out.splitlines()
    assert not [line for line in said if line.startswith("FAIL")] and said[-1] == "everything is installed"
    subjects = [line[5:].partition(":")[0] for line in said[:-1]]
    assert len(set(subjects)) == len(subjects), "each is told once"
    for name in ("python", "memory", "disk", "import torch", "import vllm", "import faiss", "GPUs"):
        assert [line for line in said if line.startswith((f"ok   {name}: ", f"warn {name}: "))], name


def test_a_library_that_is_missing_or_crashes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert str(doctor.imported("json", "print('here')")) == "ok   import json: here"
    absent = doctor.imported("no_such_library", "")
    assert absent.level == "FAIL" and "No module named 'no_such_library'" in absent.found and "setup.sh" in absent.todo
    crashes = doctor.imported("os", "os.kill(os.getpid(), 11)")
    assert crashes.level == "FAIL" and crashes.found == "the process ended by signal 11"
    monkeypatch.setattr(doctor, "IMPORTS", {"no_such_library": ""})
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "something is missing: see the lines with FAIL"


def test_torch_and_the_gpus_are_asked_for_in_one_process() -> None:
    two = "print('2.0 with CUDA'); print('H100 with 79 GiB'); print('H100 with 79 GiB')"
    assert [str(one) for one in doctor.torch_and_gpus(two)] == [
        "ok   import torch: 2.0 with CUDA",
        "ok   GPUs: 2: H100 with 79 GiB",
    ]
    torch, gpus = doctor.torch_and_gpus("print('2.0 with CUDA'); raise RuntimeError('the driver is too old')")
    assert str(torch) == "ok   import torch: 2.0 with CUDA"
    assert gpus.level == "warn" and gpus.found == "RuntimeError: the driver is too old"
    assert "setup.sh --gpu" in gpus.todo
    [absent] = doctor.torch_and_gpus("import no_such_library")
    assert absent.level == "FAIL" and "No module named 'no_such_library'" in absent.found
