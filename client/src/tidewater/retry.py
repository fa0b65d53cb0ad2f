"""When to send again, and after how long. Pure: the caller sleeps."""

from dataclasses import dataclass

from tidewater_core.errors import OutcomeUnknown, Overloaded, Retryable, TidewaterError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with jitter, bounded in attempts and in each wait."""

    attempts_max: int = 10
    """Attempts in all; 1 means never again. Ten last about ten seconds: a worker's restart."""
    wait_ms_min: int = 20
    """The wait before the second attempt; each further one is twice as long."""
    wait_ms_max: int = 2_000
    """The longest wait, unless the server asks for more."""

    def wait_s(
        self, error: TidewaterError, attempt: int, jitter: float, *, repeatable: bool
    ) -> float | None:
        """Return how long to wait after `attempt` (from 1) failed; None gives up.

        `repeatable` says that sending twice does no harm. Otherwise only a request that was
        certainly not processed is sent again.
        """
        if attempt >= self.attempts_max:
            return None
        if isinstance(error, OutcomeUnknown):
            if not repeatable:
                return None
        elif not isinstance(error, (Retryable, Overloaded)):
            return None
        wait_ms = min(self.wait_ms_min << (attempt - 1), self.wait_ms_max)
        # Half is fixed and half is drawn, so that producers that failed together come back apart.
        drawn_ms = wait_ms * (0.5 + jitter / 2)
        return max(drawn_ms, error.retry_after_ms or 0) / 1000


NO_RETRY = RetryPolicy(attempts_max=1)
