"""The commands: one file a verb.

Comes in: the words of a command line.
Goes out: what is printed, and the exit code.
May not: conclude anything: the other rooms do.
"""
