"""Reads the stacks of a process's threads, and finds whether a thread waits for an array."""

from jaxdist._processes.watching.stacks.thread_stack import ArrayWait as ArrayWait
from jaxdist._processes.watching.stacks.thread_stack import HeldStack as HeldStack
from jaxdist._processes.watching.stacks.thread_stack import find_line_in_dump as find_line_in_dump
from jaxdist._processes.watching.stacks.thread_stack import (
    find_thread_in_dump as find_thread_in_dump,
)
from jaxdist._processes.watching.stacks.thread_stack import find_users_line as find_users_line
from jaxdist._processes.watching.stacks.thread_stack import format_stack as format_stack
from jaxdist._processes.watching.stacks.thread_stack import is_in_array_wait as is_in_array_wait
from jaxdist._processes.watching.stacks.thread_stack import read_held_stacks as read_held_stacks
