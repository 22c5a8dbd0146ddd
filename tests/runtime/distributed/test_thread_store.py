"""The store of threads: whoever waits for a queue gets what is put there, and nobody else."""

import random
import threading
from datetime import timedelta
from queue import SimpleQueue

from aurora.runtime.distributed.thread_store import ThreadStore


def test_each_queue_wakes_the_thread_that_waits_for_it():
    store, found = ThreadStore(), SimpleQueue()
    store.set_timeout(timedelta(seconds=30))

    def wait_for(queue):
        while (value := store.queue_pop(queue)) != b"end":
            found.put((queue, value))

    threads = [threading.Thread(target=wait_for, args=(queue,)) for queue in "abc"]
    for thread in threads:
        thread.start()
    rng = random.Random(0)
    for _ in range(60):
        queue = rng.choice("abc")
        store.queue_push(queue, b"value")
        assert found.get(timeout=20) == (queue, b"value")
    for queue in "abc":
        store.queue_push(queue, b"end")
    for thread in threads:
        thread.join()
