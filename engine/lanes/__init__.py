"""One model over several GPUs of a host: a lane each, in one process."""
