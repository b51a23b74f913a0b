"""One small loop that every experiment trains with: schedule, checkpoints, exact resumption, sweeps."""
