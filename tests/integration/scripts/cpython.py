"""Runs one of CPython's own test modules in this process: ``cpython.py FILE MODULE SECONDS [ID…]``.

FILE gets a line of JSON when a test begins, and one when it has ended: its id, and how. One that takes more than SECONDS ends the
process. Of IDs that are given, only those tests run; those that begin with a minus do not. The tests of multiprocessing
are classes of ``__main__``, so that its children have to find the script.
"""

import faulthandler
import json
import sys
import unittest

FILE, MODULE, SECONDS, *WHICH = sys.argv[1:]
ONLY = [name for name in WHICH if name[0] != "-"]
WITHOUT = tuple(name[1:] for name in WHICH if name[0] == "-")
METHOD = MODULE.removeprefix("test_multiprocessing_")

if MODULE != METHOD and METHOD in ("fork", "spawn", "forkserver"):
    # As the modules of these names do, which not every distribution of Python has.
    from test._test_multiprocessing import install_tests_in_module_dict

    install_tests_in_module_dict(globals(), METHOD)
    NAME = "__main__"
else:
    NAME = f"test.{MODULE}"


class Outcomes(unittest.TextTestResult):
    """Tells how each test ends."""

    def tell(self, test, outcome):
        with open(FILE, "a") as file:
            print(json.dumps([test.id(), outcome]), file=file)

    def startTest(self, test):
        super().startTest(test)
        self.tell(test, "did not end")
        faulthandler.dump_traceback_later(float(SECONDS), exit=True)

    def stopTest(self, test):
        faulthandler.cancel_dump_traceback_later()
        super().stopTest(test)

    def addSuccess(self, test):
        super().addSuccess(test)
        self.tell(test, "ok")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.tell(test, f"skipped: {reason}")

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.tell(test, "failure")

    def addError(self, test, err):
        super().addError(test, err)
        self.tell(test, "error")

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.tell(test, "failure")

    def addExpectedFailure(self, test, err):
        super().addExpectedFailure(test, err)
        self.tell(test, "expected failure")

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.tell(test, "unexpected success")


def tests_in(suite):
    """The single tests of a suite."""
    for each in suite:
        yield from tests_in(each) if isinstance(each, unittest.TestSuite) else [each]


def main():
    """Run the tests."""
    from test import support

    # Neither network nor gigabytes.
    support.use_resources = []
    suite = unittest.defaultTestLoader.loadTestsFromName(NAME)
    wanted = [test for test in tests_in(suite) if not test.id().endswith(WITHOUT)]
    if ONLY:
        wanted = [test for test in wanted if test.id() in ONLY]
    unittest.TextTestRunner(verbosity=2, resultclass=Outcomes).run(unittest.TestSuite(wanted))


if __name__ == "__main__":
    main()
