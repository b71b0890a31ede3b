"""Child processes: start, talk to, limit, end, and say why one ended.

- `children`: common parts of them: the environment, limits of time and memory, groups, how one ended; and the rest of a
  program in a fork of it (`go_on_in_child`).
- `forking`: a function called in a fork of a process that has loaded TensorFlow already (`run_child`, `call_in_fork`);
  `fork_server` runs on the other side.
- `channel`: many requests to one module, with large arrays (`ChannelChild`, `serve_requests`).
- `executors`: many tasks in local processes or on a cluster (`run_tasks`).
"""
