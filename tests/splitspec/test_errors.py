"""The error tree says what is wrong in one short line."""

from __future__ import annotations

from splitspec.errors import Code, InvalidArgument, SplitspecError, from_wire


def test_an_invalid_argument_names_field_value_and_range() -> None:
    error = InvalidArgument.of("sampling.top_p", 1.5, "above 0, up to 1")
    assert error.message == "sampling.top_p is 1.5; expected above 0, up to 1"
    assert error.metadata == {
        "field": "sampling.top_p",
        "value": "1.5",
        "expected": "above 0, up to 1",
    }


def test_a_long_value_is_cut_in_the_line_and_in_the_details() -> None:
    error = InvalidArgument.of("text", "x" * 500, "less")
    assert len(error.message) < 120
    assert len(error.metadata["value"]) == 80
    assert len(SplitspecError("", value="y" * 500).metadata["value"]) == 200


def test_details_may_have_any_name_a_peer_thinks_of() -> None:
    error = from_wire("NO_FREE_SLOT", "full", {"message": "m", "self": "s", "code": "c"})
    assert error.metadata == {"message": "m", "self": "s", "code": "c"}
    assert (error.code, error.message) == (Code.RESOURCE_EXHAUSTED, "full")


def test_one_reason_of_many_does_not_change_the_class() -> None:
    error = from_wire("SOMETHING_NEW", "new", {})
    assert error.reason == "SOMETHING_NEW"
    assert SplitspecError.reason == "INTERNAL"
