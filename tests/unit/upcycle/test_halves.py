import numpy as np
import pytest

from kitelib.errors import FormatError
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.drift import drift

CODECS = [get_codec("fp16_quant", compression) for compression in ("none", "zstd")]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_logits_take_half_and_move_little(codec):
    logits = (10 * np.random.default_rng(1).standard_normal(5000)).astype(np.float32)
    data = logits.view(np.uint8)
    blob = codec.encode(data, "float32", (5000,))
    assert len(blob) <= len(data) // 2
    decoded = codec.decode(blob, len(data), "float32", (5000,))
    assert not decoded.flags.writeable
    assert np.array_equal(decoded.view(np.float32), logits.astype(np.float16).astype(np.float32))
    assert 0 < drift(codec, data, "float32", (5000,)) < 2**-11


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_masks_stay_infinite_and_large_values_stay_finite(codec):
    values = np.array([-np.inf, np.inf, 1e30, -1e30, 0.0, -0.0, 65519.0], np.float32)
    decoded = codec.decode(codec.encode(values.view(np.uint8), "float32", (7,)), 28, "float32", (7,))
    expected = np.array([-np.inf, np.inf, 65504, -65504, 0.0, -0.0, 65504], np.float32)
    assert decoded.tobytes() == expected.tobytes()
    nan = np.full(3, np.nan, np.float32)
    assert np.isnan(
        codec.decode(codec.encode(nan.view(np.uint8), "float32", (3,)), 12, "float32", (3,)).view("<f4")
    ).all()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_other_types_and_sizes_are_refused(codec):
    with pytest.raises(FormatError, match="float32"):
        codec.encode(np.zeros(8, np.uint8), "float16", (4,))
    blob = bytes(codec.encode(np.zeros(8, np.uint8), "float32", (2,)))
    for num_bytes in (4, 12):
        with pytest.raises(FormatError):
            codec.decode(blob, num_bytes, "float32", (num_bytes // 4,))
    with pytest.raises(FormatError):
        codec.decode(blob[:-1], 8, "float32", (2,))
