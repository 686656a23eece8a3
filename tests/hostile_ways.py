"""Ways to train one tiny run in hostile company; as a program, it prints what each way gave."""

import json
import os
import sys
import threading
import warnings

import numpy as np

import minigen

SETTINGS = {
    "training.steps": 4,
    "training.batch_size": 40,
    "tokenizer.vocab_size": 270,
    "model.context_length": 3,
    "model.embedding_dim": 5,
    "optimizer.warmup_steps": 1,
    "optimizer.gradient_clip": 0.1,
    "evaluation.every": 4,
    "sampling.every": 2,
    "sampling.max_new_tokens": 12,
    "sampling.top_p": 0.9,
}


def make():
    return minigen.Run(minigen.Config.load("fables", SETTINGS))


def told(run, records):
    facts = [
        run.fingerprint,
        [record.metrics() for record in records],
        [record.sample.token_ids for record in records if record.sample],
    ]
    return json.loads(json.dumps(facts))  # as another process tells it


def plain():
    run = make()
    return told(run, run.train())


def raising():
    with np.errstate(all="raise"):
        return plain()


def in_thread(work=plain):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def in_small_stack():
    old = threading.stack_size(256 * 1024)
    try:
        return in_thread()
    finally:
        threading.stack_size(old)


def interleaved():
    runs = [make(), minigen.Run(minigen.Config.load("fables", {**SETTINGS, "run.seed": 9})), make()]
    records = [[], [], []]
    for _ in range(4):
        for run, taken in zip(runs, records, strict=True):
            np.random.seed(0)
            taken += run.train(1)
    assert told(runs[0], records[0]) == told(runs[2], records[2]) != told(runs[1], records[1])
    return told(runs[0], records[0])


def in_fork():
    read, write = os.pipe()
    with warnings.catch_warnings(action="ignore"):  # of the threads that a child has not
        child = os.fork()
    if not child:
        try:
            os.write(write, json.dumps(plain()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        found = json.loads(pipe.read())
    os.waitpid(child, 0)
    return found


if __name__ == "__main__":
    print(json.dumps([globals()[way]() for way in sys.argv[1:]]))
