"""What children of the tests do."""

import os
import threading


def fails(order, send):
    send(order)
    send([4])
    raise ValueError("three lines\nand more\nof it")


def counts(order, send):
    send(len(order))


def waits_for_ever(order, send):
    send(os.getpid())
    threading.Event().wait()
