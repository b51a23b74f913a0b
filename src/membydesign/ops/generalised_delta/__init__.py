"""A memory whose drift forgets along one direction more than along others, as RWKV-7 has it. No filter of a design."""
