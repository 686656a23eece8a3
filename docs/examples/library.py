"""All that the commands do, through `import minigen` alone; its files go to the current folder."""

import minigen

sizes = {"tokenizer": {"vocab_size": 257}, "model": {"context_length": 3, "embedding_dim": 4}}
steps = {"training": {"steps": 20, "batch_size": 32}, "optimizer": {"warmup_steps": 5}}
config = minigen.Config.load("fables", {**sizes, **steps, "sampling": {"every": 10}})

# Train: a folder with logs and checkpoints, then the same run by hand, asked for text on the way.
folder = minigen.RunFolder.create("runs/mine", minigen.Run(config))
losses = [record.loss for record in folder.steps()]
run = minigen.Run(config)
records = run.train(10)
print(run.generate("Once", max_new_tokens=20, temperature=0.8))
records += run.train(10, progress=True)
assert [record.loss for record in records] == losses
run.save("mine.safetensors")

# Write: one text, several, as a stream, with a draft, with beams.
model = minigen.load("runs/mine")
text = model.generate("Once", max_new_tokens=20, temperature=0.8, stop="\n", seed=1)
print(text.text, text.finish_reason, len(text.token_ids))
policy = minigen.Policy(temperature=0.7, top_k=40, repetition_penalty=1.1)
several = model.generate(["Once", "Then"], num_samples=2, policy=policy, max_new_tokens=20)
assert len(several) == 4
for piece in model.stream("Once", max_new_tokens=20, seed=1):
    print(piece, end="", flush=True)
guessed = model.generate("Once", draft=minigen.load("mine.safetensors"), max_new_tokens=20)
print(f"\nshare of the guesses that stood: {guessed.acceptance_rate}")
print(*(beam.score for beam in model.beams("Once", num_beams=3, max_new_tokens=5)))

# Measure.
print(f"{model.score('Once there was a fox').bits_per_byte:.3f} bits per byte")
print([(likely.bytes, likely.probability) for likely in model.next("Once", top=3).candidates])
assert model.evaluate().loss == minigen.Run.load("runs/mine").evaluate()

# Check, compare, show.
assert minigen.verify("runs/mine") == []
assert model.fingerprint == run.fingerprint == run.generator.fingerprint
claim = next(minigen.prove(config))  # the first of them
print(f"{claim.name}: {claim.holds}, since {claim.evidence}")
for result in minigen.sweep(config, {"optimizer.learning_rate": [0.003, 0.01]}, out="runs/rates"):
    print(result["optimizer.learning_rate"], result["loss"])
print(minigen.write_report("runs/mine"))
