import mlx.core as mx
import pytest

from transports.buffers import bytes_of
from transports.header import HEADER_BYTES, Header, damage, mismatch


def header(**changes):
    values = {"sequence": 3, "label": "0F2", "shape": (2, 3), "dtype": "float32", "checksum": 7, **changes}
    return Header(**values)


@pytest.mark.parametrize(
    "sent",
    [
        header(),
        header(shape=(), label=""),
        header(shape=(1,) * 8, dtype="bfloat16", sequence=2**40),
        header(shape=(0,)),
    ],
)
def test_a_header_comes_as_it_was_sent(sent):
    encoded = sent.encode()
    assert (encoded.shape, encoded.dtype) == ((HEADER_BYTES,), mx.uint8)
    assert Header.decode(bytes_of(encoded)) == sent


def test_bytes_that_are_no_header_are_told_apart():
    data = bytes_of(mx.zeros((HEADER_BYTES,), mx.uint8))
    assert Header.decode(data) is None
    assert mismatch(None, 0, "0F0", (1,), mx.float32) == (
        "bytes came that are no header, where message 0, 0F0, float32 (1,) was expected"
    )


@pytest.mark.parametrize(
    "change", [{"sequence": 4}, {"label": "1B2"}, {"shape": (3, 2)}, {"dtype": "bfloat16"}, {"shape": (2, 3, 1)}]
)
def test_a_message_that_is_not_the_one_waited_for_is_told_with_both_views(change):
    found = header(**change)
    said = mismatch(found, 3, "0F2", (2, 3), mx.float32)
    assert said == f"the sender says {found}, but the receiver expects message 3, 0F2, float32 (2, 3)"
    assert mismatch(header(), 3, "0F2", (2, 3), mx.float32) is None


def test_damaged_bytes_are_told_from_whole_ones():
    array = mx.arange(12, dtype=mx.float32)
    data = bytes_of(array)
    sent = Header.of(0, "0F0", array.shape, array.dtype, data)
    assert damage(sent, data) is None
    data[5] ^= 1
    assert "bytes were damaged" in damage(sent, data)


def test_long_labels_are_cut_at_64_bytes_of_text():
    label = "ü" * 40
    sent = Header.of(0, label, (1,), mx.int8, bytes_of(mx.zeros((1,), mx.int8)))
    assert sent.label == "ü" * 32
    assert mismatch(Header.decode(bytes_of(sent.encode())), 0, label, (1,), mx.int8) is None


def test_more_than_8_dimensions_are_refused():
    with pytest.raises(ValueError, match="at most 8 dimensions"):
        Header.of(0, "", (1,) * 9, mx.int8, bytes_of(mx.zeros((1,) * 9, mx.int8)))
