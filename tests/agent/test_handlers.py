"""Which handler takes an exception: one for its type, or one for anything."""

from __future__ import annotations

import contextlib
import sys

import pytest

from kvtrace.agent.code.handlers import takes_anything


class Own(Exception):
    pass


def lookup():
    return {}["x"]


def for_its_type():
    try:
        return lookup()
    except KeyError:
        return None


def for_a_base_of_it():
    for at in range(2):
        try:
            [][at]
        except LookupError:
            pass
        except Exception:
            return


def among_several():
    try:
        with open("/dev/null"):
            lookup()
    except (OSError, KeyError) as error:
        str(error)


def for_anything():
    try:
        lookup()
    except Exception:
        pass


def bare():
    try:
        lookup()
    except:  # noqa: E722
        pass


def after_others():
    try:
        lookup()
    except Own:
        pass
    except BaseException as error:
        str(error)


def outside_of_another():
    try:
        try:
            lookup()
        except ValueError as error:
            str(error)
        else:
            print()
        finally:
            print(end="")
    except (TypeError, Exception):
        pass


def outside_of_a_with():
    try:
        with contextlib.suppress(ValueError):
            lookup()
    except Exception:
        return


def by_a_context_manager():
    with contextlib.suppress(KeyError):
        lookup()


def caught_in(function):
    """The offset at which the exception left the call in ``function``, and its class's names."""
    found = []

    def inside(frame, event, argument):
        if event == "exception" and not found:
            found.append((frame.f_lasti, [cls.__name__ for cls in argument[0].__mro__[:-3]]))
        return inside

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: inside if frame.f_code is function.__code__ else None)
    try:
        function()
    finally:
        sys.settrace(before)
    return found[0]


@pytest.mark.parametrize(
    ("function", "anything"),
    [
        (for_its_type, False), (for_a_base_of_it, False), (among_several, False), (for_anything, True),
        (bare, True), (after_others, True), (outside_of_another, True), (outside_of_a_with, True),
        (by_a_context_manager, None),
    ],
)  # fmt: skip
def test_the_handler_that_takes_an_exception(function, anything):
    at, names = caught_in(function)
    expected = anything if sys.version_info >= (3, 11) else None  # no table of handlers before that
    assert takes_anything(function.__code__, at, names) is expected


def test_byte_code_that_is_not_understood_says_nothing():
    assert takes_anything(for_anything.__code__, 10_000, ["KeyError"]) is None
    assert takes_anything(object(), 0, ["KeyError"]) is None
