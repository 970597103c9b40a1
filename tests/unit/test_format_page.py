"""docs/format.md is true: the reader in it, run as it stands there, reads what Headframe wrote."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_output import encode, write_extracted, write_finished

from headframe_worker.finalize.samples_index import SAMPLES_SCHEMA
from headframe_worker.format.part import decode_header, header_bytes
from headframe_worker.stores.local import LocalStore

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]


def test_the_reader_needs_numpy_and_nothing_else() -> None:
    imported = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(CODE))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {name.split(".")[0] for name in imported} - sys.stdlib_module_names == {"numpy"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_the_reader_reads_every_sample(tmp_path: Path, dtype: Any) -> None:
    output = write_finished(tmp_path, dtype=dtype)
    reader: dict[str, Any] = {}
    exec(compile(CODE, "docs/format.md", "exec"), reader)
    seen = []
    for row, tokens, mask, states in reader["read_dataset"](output.directory):
        seen.append(int(row))
        assert tokens.tolist() == output.tokens[row].tolist()
        assert mask.tolist() == output.masks[row].tolist()
        stored, scales = encode(output.states[row], dtype)
        expected = stored.float() if scales is None else stored.float() * scales[..., None]
        np.testing.assert_array_equal(states, expected.numpy())
    assert sorted(seen) == output.kept


def test_every_tensor_column_and_key_is_described(tmp_path: Path) -> None:
    output = write_extracted(LocalStore(tmp_path / "output"), dtype="float8_e4m3fn")
    data = next(output.directory.glob("states/*/*.safetensors")).read_bytes()
    header = decode_header(data[: header_bytes(data[:8])], where="part")
    described = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert list(header.tensors) == described  # in their order on disk
    for name in (*SAMPLES_SCHEMA.names, *type(header.metadata).model_fields):
        assert f"`{name}`" in PAGE
