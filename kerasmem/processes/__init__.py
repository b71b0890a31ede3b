"""Child processes: start, talk to, limit, end, and say why one ended.

- `children`: what all of them share: the environment, limits of time and memory, groups, how one ended.
- `task`: one request to a module and its answer in JSON (`run_child`, `serve`).
- `channel`: many requests to a module, with large arrays (`ChannelChild`, `serve_requests`).
- `forking`: a function called in a fork of a process that has loaded TensorFlow already (`ForkedCall`);
  `fork_server` runs on the other side.
"""
