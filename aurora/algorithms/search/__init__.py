"""The search of who sits where: one state, four moves, three drivers, and prices that are plugged in.

- State: `slots_core.Slots`: the expert in each slot, even shares of replicas, and sums of each GPU in each case.
- Moves: `swap` two slots (or move to an empty one), `overwrite` a slot by a further replica of an expert (replicate), or by
  nothing (drop).
- Prices: what a move costs is peeked at before it is made; only sums of the GPUs that it alters are added up.
  `phase_sums`: the mean of the longest paths of terms, which is Aurora's Eq. 1 over traffic cases, or several models that
  share GPUs. `server_rows_core`: rows between servers, with limits on seconds.
  `replicas.rebalance_core`: the largest load under a budget of moves.
- Drivers: `descend` takes the best move of the GPU that delays most; `shake` (random moves) and descend again; `anneal`
  (random moves, of which some for the worse are taken). All stop after a number of evaluations, not of seconds, so the same
  seed finds the same on every machine.

Example: 2 GPUs of 3 slots, one case, experts of 8, 2, 2 and 2 s. GPU 0 holds experts 0 and 1, GPU 1 experts 2 and 3.

    1. load     [0 1 .] [2 3 .]   10 s, 4 s    GPU 0 is critical: without it the objective, 10 s, would be 6 s less
    2. peek     expert 1 moves: 8 s, 6 s; expert 0 gets a replica on GPU 1: 6 s, 8 s; ...: the first of the best is taken
    3. move     [0 . .] [2 3 1]    8 s, 6 s    nothing is better than 8 s now
    4. shake    [0 1 .] [2 3 1]    9 s, 5 s    expert 1 got a replica
    5. descend  [0 1 .] [2 3 0]    6 s, 8 s    expert 0 gets a replica in its place
                [0 1 2] [2 3 0]    7 s, 7 s    expert 2 gets one: the optimum
"""
