"""Cases that public issue threads of FSDP, DeepSpeed, Lightning, ... report, run under zfx: `python -m tests.trouble --help`."""
