"""The class that takes the place of `vllm.sequence.SequenceData`: one of stock's own, with a tuple of the prompt to hash.

Everything that is not named here is inherited, so that it is what it is in the release that is installed.
"""

from __future__ import annotations

import copy
import copyreg
import sys

MODULE, NAME = "vllm.sequence", "SequenceData"
# Lists of token ids, which are numbers: copied at once where `copy.deepcopy` would visit every one of them.
_TOKENS = frozenset(
    {"prompt_token_ids", "output_token_ids", "_prompt_token_ids", "_output_token_ids", "_cached_all_token_ids"}
)
# What cannot change, or is kept beside what it was made of: forks share it.
_SHARED = frozenset({"_prompt_token_ids_tuple", "_snapshot", "_block_hashes", "_outputs"})
# What only this class knows: it stays behind where an object is pickled, for a process that may run stock.
_OURS = frozenset({"_snapshot", "_block_hashes", "_outputs"})


def bound() -> type:
    """The class that the module holds now; stock's after the patch was taken back."""
    return getattr(sys.modules[MODULE], NAME)


def prompt_of_list(data) -> tuple:
    """The prompt of 0.4.0 to 0.4.2 as a tuple, made once for the list that the object holds."""
    held = data.prompt_token_ids
    source, prompt = data._snapshot
    if source is not held or len(prompt) != len(held):
        prompt = tuple(held)
        data._snapshot = held, prompt
    return prompt


# Both classes below also tell `copyreg` how to pickle stock's own objects, by the name that is theirs no longer: objects made
# before the patch was applied, or decoded by a type that was built before, may still be sent somewhere.


def plain(stock: type, listed: bool, copied: bool) -> type:
    """The class for 0.4.0 to 0.5.4. `listed`: stock keeps no tuple; `copied`: stock makes one of an array of all outputs."""

    def reduce_ex(self, protocol):
        state = {name: value for name, value in vars(self).items() if name not in _OURS}
        # Not copyreg.__newobj__: pickle allows that for the class of the object itself only.
        return object.__new__, (bound(),), state

    def deepcopy(self, memo):
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for name, value in vars(self).items():
            if name in _SHARED:
                fork = value
            elif name in _TOKENS and id(value) not in memo:
                fork = memo[id(value)] = value[:]
            else:
                fork = copy.deepcopy(value, memo)
            setattr(new, name, fork)
        if "_snapshot" in vars(self):
            source, prompt = self._snapshot
            new._snapshot = memo.get(id(source)), prompt
        return new

    members: dict = {"_block_hashes": None, "__reduce_ex__": reduce_ex, "__deepcopy__": deepcopy}
    if listed:
        members.update(_snapshot=(None, ()), get_prefix_token_ids=_prefix_token_ids)
    if copied:
        members.update(_outputs=None, output_token_ids=_outputs_kept(stock))
    copyreg.pickle(stock, lambda self: reduce_ex(self, 2))
    return _named(type(NAME, (stock,), members), stock)


def struct(stock: type) -> type:
    """The class for 0.5.5 to 0.10.2, where stock's is a msgspec.Struct: the same fields, so the same bytes on the wire."""

    def reduce(self):
        _, fields, *rest = stock.__reduce__(self)
        return (bound(), fields, *rest)

    def deepcopy(self, memo):
        fields = []
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name in _SHARED:
                fields.append(value)
            elif name in _TOKENS or name == "_new_appended_tokens":
                fields.append(value[:])
            else:
                fields.append(copy.deepcopy(value, memo))
        # What stock's copies do too: the constructor makes tuple and list anew.
        new = memo[id(self)] = type(self)(*fields)
        if self._block_hashes is not None:
            new._prompt_token_ids_tuple = self._prompt_token_ids_tuple
            new._block_hashes = self._block_hashes
        return new

    members = {
        "__module__": MODULE,
        "_block_hashes": None,
        "_outputs": None,
        "__reduce__": reduce,
        "__deepcopy__": deepcopy,
        "output_token_ids": _outputs_kept(stock),
    }
    copyreg.pickle(stock, reduce)
    # `dict`: what is not a field can be set, and is neither encoded nor compared.
    made = type(stock)(NAME, (stock,), members, dict=True, omit_defaults=True)
    return _named(made, stock)


def _named(made: type, stock: type) -> type:
    """Named as stock's is: pickles hold the name, and must mean stock's class where the patch is not applied."""
    made.__module__, made.__qualname__, made.__doc__ = stock.__module__, stock.__qualname__, stock.__doc__
    made.__vllm_speedups__ = "sequence-data"
    return made


def _prefix_token_ids(self, num_tokens: int) -> tuple:
    """`(prompt[:n], None)` while n lies in the prompt, `(prompt, output[:n - len(prompt)])` past it: directly hashable."""
    prompt = prompt_of_list(self)
    if num_tokens > len(prompt):
        return prompt, tuple(self.output_token_ids[: num_tokens - len(prompt)])
    return prompt[:num_tokens], None


def _outputs_kept(stock: type) -> property:
    """The property `output_token_ids`: a tuple that grows with the array, and is made anew only where that differs.

    Making the numbers of an array costs 15 ns each, and stock does so at every read: 1,000 outputs cost 12 µs, here 2.
    """

    def output_token_ids(self) -> tuple:
        held, known = self._output_token_ids, self._outputs
        if known is not None:
            outputs, seen = known
            count = len(seen)
            # Compared as bytes are: nothing says that only appending changes an array.
            if len(held) == count and held == seen:
                return outputs
            outputs = outputs + tuple(held[count:]) if held[:count] == seen else tuple(held)
        else:
            outputs = tuple(held)
        self._outputs = outputs, held[:]
        return outputs

    return property(output_token_ids, stock.output_token_ids.fset)
