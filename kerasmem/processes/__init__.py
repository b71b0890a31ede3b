"""Start, limit and end child processes, exchange data with them, and explain how they ended.

- `children`: environment, limits, process groups and exit codes; `continue_in_child` forks the running program.
- `forking`: call a function in a fork of a process that has loaded TensorFlow (`run_child`, `call_in_fork`);
  `fork_server` is that process.
- `channel`: send many requests with large arrays to one child (`ChannelChild`, `serve_requests`).
- `executors`: run tasks in local processes or on a cluster (`run_tasks`).
"""
