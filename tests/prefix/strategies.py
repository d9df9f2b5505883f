"""What the property tests draw: token ids of every size class, extra keys of every kind, runs of blocks."""

from __future__ import annotations

from hypothesis import strategies as st

# Both sides of every width at which pickle or CBOR changes its encoding.
EDGES = (0, 1, 22, 23, 24, 25, 254, 255, 256, 257, 65534, 65535, 65536, 65537, 2**24 - 1, 2**24, 2**31 - 1)

token_ids = st.one_of(st.sampled_from(EDGES), st.integers(0, 200), st.integers(0, 152_000), st.integers(0, 2**31 - 1))
block_sizes = st.sampled_from((1, 2, 3, 4, 5, 8, 16, 23, 24, 32, 255, 256, 300))

_key = st.one_of(
    st.text(max_size=12),
    st.binary(max_size=40),
    st.tuples(st.just("mm"), st.text(max_size=8), st.integers(-5000, 5000)),
    st.tuples(st.just("lora"), st.text(max_size=8), st.text(max_size=8)),
)
extra_keys = st.one_of(st.none(), st.lists(_key, min_size=1, max_size=4).map(tuple))


@st.composite
def twins(draw):
    """Extra keys in which one object occurs twice: pickle writes the second as a reference to the first."""
    name = draw(st.text(min_size=1, max_size=300))
    return (("lora", name, name), name, draw(_key))
