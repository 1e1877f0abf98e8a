"""The ways in which ``hanging.py`` hangs, in order, and the hook that each hangs in."""

WAYS = ("hang_loading", "hang_saving", "hang_for_thread", "hang_for_lock", "hang_for_socket")
HOOKS = ("start_load_kv", *["wait_for_save"] * 4)
