"""What ExLlamaV2 and ExLlamaV3 share: one gate, one page table, one reader of model folders.

Both libraries keep pages of 256 tokens, known by the hash of all tokens up to their end, and iterate over a
list of jobs. The packages `exllamav2` and `exllamav3` say how each does it; nothing here imports either.
torch and exllamav2 or exllamav3 are needed only by them.
"""
