"""Token-prefix hashing without copies: serialised once, chained block by block, remembered.

`PrefixHasher` hashes, `PrefixMemo` remembers, `algorithms.find` names what vLLM names. Nothing here imports vLLM.
"""

from .algorithms import Algorithm, find
from .hasher import PrefixHasher
from .memo import PrefixMemo

__all__ = ["Algorithm", "PrefixHasher", "PrefixMemo", "find"]
