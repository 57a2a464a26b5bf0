"""The roles of a run as Ray actors."""

from verl.process.startup import before_libraries

before_libraries()  # in a process of Ray's nothing has been imported yet
