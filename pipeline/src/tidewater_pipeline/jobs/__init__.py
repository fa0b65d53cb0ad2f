"""One module a job: `plan_*` decides and is pure, `run` does it with a session."""
