"""Folders that are moved from a node's own disk to the driver's; several hosts are in test_nodes.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.single_controller import ResourcePool
from verl.single_controller.folder_copies import FolderCopies


def test_what_a_killed_run_has_left_is_not_in_the_folder_that_is_brought(ray_session: Any, tmp_path: Path) -> None:
    """The driver was killed while it copied a model of two files; the next run's has one."""
    model, unfinished = tmp_path / "actor" / "global_step_5", tmp_path / "actor" / ".global_step_5.writing"
    for folder, names in ((model, ["model.safetensors"]), (unfinished, ["model-00001-of-00002.safetensors"])):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text(name)
    copies = FolderCopies(ResourcePool(1, 1, "cpu"), [0], tmp_path, timeout_s=60.0)
    try:
        copies.bring(model)
    finally:
        copies.close()
    assert [file.name for file in model.iterdir()] == ["model.safetensors"]
    assert [folder.name for folder in model.parent.iterdir()] == [model.name]
