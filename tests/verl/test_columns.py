"""The columns of a batch: what is not in the table, or not as it says, cannot be set."""

from __future__ import annotations

import copy
import pickle
import pkgutil
from dataclasses import replace

import pytest
import torch

from verl.columns import COLUMNS
from verl.protocol import TrainBatch


def batch() -> TrainBatch:
    """Two rows of 2 and 3 tokens."""
    tokens = {"ids": torch.arange(5), "loss_mask": torch.ones(5, dtype=torch.bool)}
    return TrainBatch(torch.tensor([2, 3]), tokens, {"reward": torch.zeros(2), "group": torch.arange(2)})


WRONG = [
    (
        "tokens",
        "advantages",
        torch.zeros(4),
        r"tokens\['advantages'\] is float32 \[4\]; it must be float32 .* of 5 tokens",
    ),
    ("tokens", "advantages", torch.zeros(5, 1), r"is float32 \[5, 1\]; it must be float32 with 1 dimensions"),
    ("tokens", "advantages", torch.zeros(5, dtype=torch.float64), r"is float64 \[5\]; it must be float32"),
    ("tokens", "keep", torch.zeros(5), r"tokens\['keep'\] is float32 \[5\]; it must be bool"),
    ("tokens", "top_index", torch.zeros(5, dtype=torch.int32), r"is int32 \[5\]; it must be int32 with 2 dimensions"),
    ("tokens", "advantage", torch.zeros(5), r"tokens\['advantage'\] is no column of a batch, those are ids, loss_mask"),
    ("tokens", "reward", torch.zeros(5), r"tokens\['reward'\] is no column"),
    ("rows", "reward", torch.zeros(5), r"rows\['reward'\] is float32 \[5\]; it must be float32 .* of 2 rows"),
    ("rows", "group", torch.zeros(2), r"rows\['group'\] is float32 \[2\]; it must be int64"),
]


@pytest.mark.parametrize(("kind", "name", "column", "message"), WRONG)
@pytest.mark.parametrize("way", ["set", "update", "or", "setdefault", "construct"])
def test_a_column_that_is_not_as_the_table_says_is_refused(
    way: str, kind: str, name: str, column: torch.Tensor, message: str
) -> None:
    made = batch()
    columns = getattr(made, kind)
    present = columns.pop(name, None)
    with pytest.raises(ValueError, match=message):
        match way:
            case "set":
                columns[name] = column
            case "update":
                columns.update({name: column})
            case "or":
                columns |= {name: column}
            case "setdefault":
                columns.setdefault(name, column)
            case "construct":
                replace(made, **{kind: columns | {name: column}})
    assert name not in columns
    if present is not None:
        columns[name] = present


def test_columns_as_the_table_says_are_set_and_go_through_copies() -> None:
    made = batch()
    made.tokens["advantages"] = torch.arange(5.0)
    made.tokens |= {"top_index": torch.zeros(5, 3, dtype=torch.int32)}
    assert made.tokens.setdefault("advantages", torch.zeros(5)).tolist() == [0, 1, 2, 3, 4]
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert again.tokens.keys() == made.tokens.keys()
        assert all(torch.equal(again.tokens[name], column) for name, column in made.tokens.items())
        with pytest.raises(ValueError, match="is no column"):
            again.tokens["other"] = torch.zeros(5)
    assert made.select([1]).tokens["advantages"].tolist() == [2, 3, 4]


NAMES = {name for of in COLUMNS.values() for column in of.values() for name in (column.writer, *column.readers) if name}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_writers_and_readers_are_there(name: str) -> None:
    assert callable(pkgutil.resolve_name(name))


def test_each_type_is_one_of_torch() -> None:
    assert all(isinstance(getattr(torch, c.dtype), torch.dtype) for of in COLUMNS.values() for c in of.values())
