from tests.process.conftest import job, lighthouse, make_job

__all__ = ["job", "lighthouse", "make_job"]
