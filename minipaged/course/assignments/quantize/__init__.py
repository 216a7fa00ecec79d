"""Assignment 7: pack, unpack, round to nearest, and one column of GPTQ."""
