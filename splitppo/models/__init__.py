"""Policy, value and reward models on the ranks of a group. Import from the files; nothing is loaded here.

build      a model folder's configuration; the model that it describes, without memory
tokenizer  a model folder's tokenizer
weights    reading a folder's weights shard by shard; writing a folder
sharding   fully_shard, compilation, gathering full weights
batching   rows as inputs of a forward pass; cutting rows into micro-batches
attention  attention over packed rows
heads      log-probs, entropies and values of the response tokens
runner     forward passes of a group; frozen models (reference, reward model)
balance    moving rows between ranks so that all have equal work
probe      whether a model runs on packed rows, tried on a small copy
tiny       the embedded model
"""
