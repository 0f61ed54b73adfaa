"""Runs one of CPython's own test modules in this process: ``cpython.py FILE MODULE [ID…]``.

How each test has ended goes into FILE, as JSON by test id. Of IDs that are given, only those tests run. The tests of
multiprocessing are classes of ``__main__``, so that its children have to find the script.
"""

import json
import sys
import unittest

FILE, MODULE, *ONLY = sys.argv[1:]
METHOD = MODULE.removeprefix("test_multiprocessing_")

if MODULE != METHOD and METHOD in ("fork", "spawn", "forkserver"):
    # As the modules of these names do, which not every distribution of Python has.
    from test._test_multiprocessing import install_tests_in_module_dict

    install_tests_in_module_dict(globals(), METHOD)
    NAME = "__main__"
else:
    NAME = f"test.{MODULE}"


class Outcomes(unittest.TextTestResult):
    """Remembers how each test has ended."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.outcomes = {}

    def addSuccess(self, test):
        super().addSuccess(test)
        self.outcomes.setdefault(test.id(), "ok")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.outcomes[test.id()] = f"skipped: {reason}"

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.outcomes[test.id()] = "failure"

    def addError(self, test, err):
        super().addError(test, err)
        self.outcomes[test.id()] = "error"

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.outcomes[test.id()] = "failure"

    def addExpectedFailure(self, test, err):
        super().addExpectedFailure(test, err)
        self.outcomes[test.id()] = "expected failure"

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.outcomes[test.id()] = "unexpected success"


def tests_in(suite):
    """The single tests of a suite."""
    for each in suite:
        yield from tests_in(each) if isinstance(each, unittest.TestSuite) else [each]


def main():
    """Run the tests, write how they have ended."""
    from test import support

    # Neither network nor gigabytes.
    support.use_resources = []
    suite = unittest.defaultTestLoader.loadTestsFromName(NAME)
    if ONLY:
        suite = unittest.TestSuite(each for each in tests_in(suite) if each.id() in ONLY)
    result = unittest.TextTestRunner(verbosity=2, resultclass=Outcomes).run(suite)
    with open(FILE, "w") as file:
        json.dump(result.outcomes, file)


if __name__ == "__main__":
    main()
