"""A wheel has a copy of assignments/, which `minipaged course start` hands out. All else is in pyproject.toml."""

from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree

from setuptools import setup
from setuptools.command.build_py import build_py


class WithAssignments(build_py):
    """Builds the packages, and puts the copy beside what reads it (minipaged/course/grader/handouts.py)."""

    def run(self):
        super().run()
        if not self.editable_mode:  # a clone has the folder itself
            copy = Path(self.build_lib, "minipaged/course/handed_out")
            rmtree(copy, ignore_errors=True)  # of a build before this one
            copytree("assignments", copy, ignore=ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": WithAssignments})
