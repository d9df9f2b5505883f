"""Verify mode: answers compared with stock's, a difference reverted and told once, request data only where asked for."""

from __future__ import annotations

import json
import logging
import os
import random

import pytest

from vllm_speedups.patching import REVERTED, Verification


def build_checked(workshop, answer):
    """Glue of lib:double whose own result is `answer(x)`, and which verifies as the contract of Context says."""
    path = workshop.path("lib:double")

    def build(context):
        stock = context.stock[path]

        def double(x):
            if context.verifies is None or not context.verifies():
                return answer(x)
            if answer(x) != stock(x):
                context.differed({"ours": answer(x)}, {"x": x})
            return stock(x)

        return {path: double}

    return build


def applied(workshop, answer, verification, **more):
    lib = workshop.load("lib")
    patch = workshop.patch("lib:double", build=build_checked(workshop, answer), **more)
    patch.verification = verification
    return lib, workshop.apply(patch)


def test_nothing_is_verified_unless_the_user_asked_for_it(workshop):
    lib, patch = applied(workshop, lambda x: x, Verification(0.0))
    assert [lib.double(x) for x in range(50)] == list(range(50))
    assert (patch.verified, patch.live) == (0, True)


def test_right_answers_are_counted_and_nothing_is_said(workshop, said):
    lib, patch = applied(workshop, lambda x: x + x, Verification(1.0))
    assert [lib.double(x) for x in range(10)] == list(range(0, 20, 2))
    assert (patch.verified, patch.differences, patch.live) == (10, 0, True) and said.texts(logging.ERROR) == []


def test_a_share_of_the_answers_is_verified_and_no_seeded_sequence_disturbed(workshop):
    lib, patch = applied(workshop, lambda x: x + x, Verification(0.25))
    random.seed(7)
    expected = random.random()
    random.seed(7)
    for x in range(4000):
        lib.double(x)
    assert 800 < patch.verified < 1200 and random.random() == expected


def test_a_difference_gives_stocks_answer_reverts_and_is_told_once(workshop, said):
    lib, patch = applied(workshop, lambda x: x * 2 + (x == 3), Verification(1.0))
    kept = lib.double
    assert [kept(x) for x in range(6)] == [0, 2, 4, 6, 8, 10]
    assert (patch.status, patch.live, patch.differences) == (REVERTED, False, 1)
    assert "differed from stock" in patch.reason
    (error,) = said.texts(logging.ERROR)
    assert "speedy was reverted" in error and '"ours": 7' in error and '"form": "only"' in error
    assert '"x"' not in error and "VLLM_SPEEDUPS_VERIFY_DUMP" in error


def test_what_a_request_held_is_written_to_the_users_folder_alone(workshop, said, tmp_path):
    folder = tmp_path / "new" / "folder"
    lib, _ = applied(workshop, lambda x: 0, Verification(1.0, str(folder)))
    assert lib.double(4) == 8
    (file,) = folder.iterdir()
    assert json.loads(file.read_text()) == {"patch": "speedy", "form": "only", "ours": 0, "x": 4}
    assert file.stat().st_mode & 0o077 == 0 and file.name == f"speedy-{os.getpid()}.json"
    assert str(file) in said.texts(logging.ERROR)[0]


def test_a_folder_that_cannot_be_written_is_named_and_stock_goes_on(workshop, said, tmp_path):
    (tmp_path / "file").write_text("")
    lib, patch = applied(workshop, lambda x: 0, Verification(1.0, str(tmp_path / "file")))
    assert lib.double(4) == 8 and patch.status == REVERTED
    assert f"VLLM_SPEEDUPS_VERIFY_DUMP={str(tmp_path / 'file')!r} cannot be written" in said.texts(logging.ERROR)[0]


def test_the_probe_sees_what_the_patch_answers_itself(workshop):
    def probe(context, replacements):
        seen.append(replacements[workshop.path("lib:double")](3))

    seen = []
    lib, patch = applied(workshop, lambda x: -x, Verification(1.0), probe=probe)
    assert lib.double(3) == 6
    assert seen == [-3] and patch.differences == 1


@pytest.mark.parametrize("live", [True, False])
def test_glue_can_ask_whether_its_patch_is_in_force(workshop, live):
    lives = []

    def build(context):
        lives.append(context.live)
        return {workshop.path("lib:double"): lambda x: x}

    workshop.load("lib")
    patch = workshop.apply(workshop.patch("lib:double", build=build))
    if not live:
        patch.revert()
    assert lives[0]() is live
