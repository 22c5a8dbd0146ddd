"""Work whose processes come and go, on torchft: who takes part, which process groups they have, and which steps count.

- `lighthouse`: torchft's lighthouse, in a process of its own
- `board`: what members tell each other in a round at the lighthouse, and what follows from it
- `member`: takes part in rounds, and in the epochs that they begin
"""
