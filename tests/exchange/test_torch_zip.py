"""torch .pt files: genuine ones are read, and nothing in a file is ever run."""

from __future__ import annotations

import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowmap_jobs.exchange import torch_zip
from rowmap_jobs.formats.base import FormatError
from tests.exchange.torch_bytes import (
    archive,
    genuine,
    keyed,
    number,
    storage,
    tensor,
    text,
)
from tests.exchange.torch_bytes import torch_zip as made


def refused(raw: bytes) -> str:
    with pytest.raises(FormatError) as caught:
        torch_zip.load(raw, "x.pt")
    line = str(caught.value)
    assert line.startswith("x.pt: ") and "\n" not in line
    return line


def test_what_torch_wrote_is_read() -> None:
    data: Any = torch_zip.load(genuine("sglang_stat"), "x.pt")
    assert list(data) == ["rank", "logical_count", "average_utilization_rate_over_window"]
    assert data["rank"] == 0 and data["average_utilization_rate_over_window"] is None
    counts = data["logical_count"]
    assert counts.shape == (3, 4, 8) and counts.dtype == np.int32
    assert (counts.sum(axis=2) == [[0, 6, 6, 6]] * 3).all()


def test_a_turned_view_has_the_values_of_the_tensor_not_of_its_bytes() -> None:
    whole: Any = torch_zip.load(genuine("sglang_stat"), "x.pt")
    view: Any = torch_zip.load(genuine("sglang_stat_view"), "x.pt")
    assert view["average_utilization_rate_over_window"] == 0.75
    assert (view["logical_count"] == whole["logical_count"][1:]).all()
    assert not view["logical_count"].flags.writeable


def test_records_with_lists_and_tensors_are_read() -> None:
    data: Any = torch_zip.load(genuine("sglang_per_token"), "x.pt")
    assert [r["forward_mode"] for r in data["records"]] == [1, 2, 2]
    assert data["records"][0]["input_ids"] == [0, 1, 2, 3, 4]
    assert data["records"][0]["extend_seq_lens"] == [5]
    assert data["records"][1]["extend_seq_lens"] is None
    assert data["last_physical_to_logical_map"].tolist() == [list(range(8))] * 4


def test_a_file_from_before_torch_1_6_is_refused_by_name() -> None:
    assert "found a bare pickle (legacy torch.save)" in refused(genuine("legacy"))


def test_a_module_is_refused_by_its_name() -> None:
    assert "found GLOBAL torch.nn.modules.linear Linear" in refused(genuine("module"))


class Trap:
    """Would touch a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize(
    ("protocol", "said"),
    [(2, "GLOBAL posix system"), (3, "a pickle of protocol 2"), (4, "a pickle of protocol 2")],
)
def test_a_reduce_of_a_shell_command_runs_nothing(tmp_path: Path, protocol: int, said: str) -> None:
    mark = tmp_path / "mark"
    body = pickle.dumps({"logical_count": Trap(mark)}, protocol)
    assert said in refused(archive({"x/data.pkl": body}))
    assert not mark.exists()
    # The trap is a real one.
    pickle.loads(body)
    assert mark.exists()


RUN = b"(X\x04\x00\x00\x00true"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"cposix\nsystem\n" + RUN + b"tR", "GLOBAL posix system"),
        (b"c__builtin__\neval\n" + RUN + b"tR", "GLOBAL __builtin__ eval"),
        (b"cbuiltins\ngetattr\n" + RUN + b"tR", "GLOBAL builtins getattr"),
        (b"ctorch.storage\n_load_from_bytes\n" + RUN + b"tR", "torch.storage _load_from_bytes"),
        (b"ctorch\nload\n" + RUN + b"tR", "GLOBAL torch load"),
        (b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n", "_rebuild_tensor_v2.__globals__"),
        (b"ctorch._utils._rebuild_tensor_v2\n__globals__\n", "_rebuild_tensor_v2 __globals__"),
        (b"ccollections\nOrderedDict\n)R}b", "opcode BUILD"),
        (b"ccollections\nOrderedDict\n(X\x01\x00\x00\x00atR", "REDUCE of collections OrderedDict"),
        (b"ctorch\nLongStorage\n)R", "REDUCE of torch LongStorage"),
        (b"ctorch\nLongStorage\n)\x81", "opcode NEWOBJ"),
        (b"ctorch\nLongStorage\n)}\x92", "opcode NEWOBJ_EX"),
        (text("posix") + text("system") + b"\x93", "opcode STACK_GLOBAL"),
        (b"\x8c\x05posix\x8c\x06system\x93", "opcode SHORT_BINUNICODE"),
        (RUN + b"iposix\nsystem\n", "opcode INST"),
        (b"(cposix\nsystem\n" + RUN[1:] + b"o", "GLOBAL posix system"),
        (b"(ctorch\nLongStorage\no", "opcode OBJ"),
        (b"\x82\x01", "opcode EXT1"),
        (b"Psomewhere\n", "opcode PERSID"),
        (b"\x97", "opcode NEXT_BUFFER"),
        (b"S'text'\n", "opcode STRING"),
        (b"I1\n", "opcode INT"),
        (b"\xff", "opcode 0xff"),
        (text("posix") + b"Q", "BINPERSID of another kind"),
        (text("x") + text("y") + b"R", "REDUCE of str"),
        (b"N)R", "REDUCE of NoneType"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(NNNNNNtR", "a tensor without a storage"),
        (storage("0", 1) + storage("0", 1) + b"R", "REDUCE of _Storage"),
        (b"}(ctorch\nLongStorage\nNu", "a key of type Word"),
        (b"}])s", "a key of type list"),
        (b"}(" + (text("a") + b"N") * 2 + b"u", "the key 'a' twice"),
        (b"})a", "APPEND to no list"),
        (b"]Na", None),
        (b"h\x00", "memo 0 before it was put"),
        (b"e", "an opcode without its MARK"),
        (b"(a", "an opcode without its operand"),
        (b"NN", "more than one object"),
        (b"N.N", "more than one object"),
        (b"(", "more than one object"),
        (b"X\xff\xff\xff\x7f", "a text of 2147483647 bytes"),
        (b"\x8a\xff", "an integer of 255 bytes"),
        (b"X\x09\x00\x00\x00ab", "the end of the pickle"),
        (b"X\x01\x00\x00\x00\xff", "a text that is not UTF-8"),
        (b"c" + b"a" * 300 + b"\n", "a global without an end"),
        (b"c\x1b[2J\nx\n", "a global that is not printable"),
    ],
)
def test_an_opcode_or_global_that_data_does_not_need_is_refused_by_name(
    body: bytes, said: str | None
) -> None:
    raw = made(body, {"0": bytes(8)})
    if said is None:
        assert torch_zip.load(raw, "x.pt") == [None]
    else:
        assert said in refused(raw)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (tensor((10**6, 10**6), (0, 0), 1), "a tensor of 1000000000000 elements"),
        (tensor((10**12,), (1,), 10**12), "BINPERSID|storage 0 of 1000000000000 elements"),
        (tensor((2,), (1,), 1), "element 1 of 1"),
        (tensor((1,), (1,), 1, offset=1), "element 1 of 1"),
        (tensor((1,), (1,), 1, offset=-1), "a tensor without a storage"),
        (tensor((2,), (-1,), 1), "strange size or stride"),
        (tensor((-1,), (1,), 1), "strange size or stride"),
        (tensor((1,), (), 1), "strange size or stride"),
        (tensor((1,) * 9, (1,) * 9, 1), "a tensor of 9 dimensions"),
        (tensor((1,), (1,), 2), "storage 0 of 2 elements in 8 bytes"),
        (tensor((1,), (1,), 1, kind="IntStorage"), "storage 0 of 1 elements in 8 bytes"),
        (tensor((1,), (1,), 1, key="1"), "no such member"),
        (tensor((1,), (1,), 1, key="../0"), "BINPERSID with another key"),
        (tensor((1,), (1,), 1, kind="UntypedStorage"), "GLOBAL torch UntypedStorage"),
    ],
)
def test_a_tensor_that_is_no_view_of_its_storage_is_refused(value: bytes, said: str) -> None:
    line = refused(made(keyed("a", value), {"0": bytes(8)}))
    assert any(part in line for part in said.split("|"))


def test_a_big_endian_file_is_read_as_such() -> None:
    raw = made(tensor((2,), (1,), 2), {"0": struct.pack(">2q", 5, -7)}, byteorder=b"big")
    assert torch_zip.load(raw, "x.pt").tolist() == [5, -7]  # type: ignore[attr-defined]
    assert "byteorder" in refused(made(b"N", byteorder=b"middle"))


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"../data.pkl": b""}, "../data.pkl"),
        ({"/x/data.pkl": b""}, "/x/data.pkl"),
        ({"x/data.pkl": b"\x80\x02N.", "y/version": b"3"}, "2 folders"),
        ({"x/data.pkl": b"\x80\x02N.", "x/data/../1": b""}, "x/data/../1"),
        ({"x/data.pkl": b"\x80\x02N.", "x/code/run.py": b""}, "x/code/run.py"),
        ({"x/version": b"3"}, "no data.pkl"),
        ({"data.pkl": b"\x80\x02N."}, "data.pkl"),
        ({}, "0 folders"),
    ],
)
def test_members_that_torch_does_not_write_are_refused(
    members: dict[str, bytes], said: str
) -> None:
    line = refused(archive(members))
    assert "members" in line and said in line


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("x/data.pkl", b"\x80\x02N.")
        packed.writestr("x/data.pkl", b"\x80\x02K\x01.")
    assert "data.pkl twice" in refused(path.read_bytes())


def peak_of(raw: bytes) -> int:
    tracemalloc.start()
    refused(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_bombs_are_refused_in_little_memory() -> None:
    inflating = archive({"x/data.pkl": b"\x80\x02" + b"(" * (40 << 20)}, zipfile.ZIP_DEFLATED)
    assert len(inflating) < 100_000 and peak_of(inflating) < 1 << 20
    declared = bytearray(archive({"x/data.pkl": b"\x80\x02N.", "x/data/0": bytes(99)}))
    at = declared.rfind(struct.pack("<II", 99, 99))
    declared[at : at + 8] = struct.pack("<II", 99, 0x7FFFFFFF)
    assert "unpacked size" in refused(bytes(declared)) and peak_of(bytes(declared)) < 1 << 20
    # More bytes than declared come out of the member.
    lying = bytearray(archive({"x/data.pkl": b"\x80\x02N." + bytes(9999)}, zipfile.ZIP_DEFLATED))
    at = lying.rfind(struct.pack("<I", 10003))
    lying[at : at + 4] = struct.pack("<I", 4)
    assert "data.pkl" in refused(bytes(lying))


def test_a_pickle_of_containers_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_zip, "MAX_OBJECTS", 1000)
    assert "more than 1000 containers" in refused(made(b"]" * 1001))
    assert "more than 1000 containers" in refused(made(b"]" + b"q\x00" * 1000))


def test_lists_that_hold_each_other_ten_times_stay_small() -> None:
    body = b"(]q\x00"
    for level in range(1, 30):
        body += b"](" + (b"h" + bytes([level - 1])) * 10 + b"eq" + bytes([level])
    data: Any = torch_zip.load(made(body + b"t"), "x.pt")
    assert len(data) == 30 and data[29][0] is data[28]


@given(st.binary(max_size=120))
def test_random_bytes_never_pass(raw: bytes) -> None:
    refused(raw)


@given(st.binary(max_size=60))
def test_random_pickles_run_nothing_and_end_in_data_or_a_refusal(body: bytes) -> None:
    try:
        torch_zip.load(made(body, {"0": bytes(8)}), "x.pt")
    except FormatError as error:
        assert "\n" not in str(error)


@given(st.data())
def test_a_changed_or_cut_file_is_refused_or_says_the_same(data: st.DataObject) -> None:
    raw = genuine("sglang_map")
    wanted = torch_zip.load(raw, "x.pt")
    changed = bytearray(raw)
    if data.draw(st.booleans()):
        changed[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        del changed[data.draw(st.integers(0, len(raw) - 1)) :]
    try:
        got: Any = torch_zip.load(bytes(changed), "x.pt")
    except FormatError as error:
        assert "\n" not in str(error)
    else:
        key = "physical_to_logical_map"
        assert list(got) == [key] and (got[key] == wanted[key]).all()  # type: ignore[index]


def test_keys_are_numbers_too() -> None:
    assert torch_zip.load(made(b"}" + number(3) + text("a") + b"s"), "x.pt") == {3: "a"}
