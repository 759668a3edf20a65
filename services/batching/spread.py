"""How far samples of throughput usually lie from what was expected of them: what "usual noise" is, measured.

Law: pure. As a share of what was expected, since noise of a rate is one; robust, so that one sample that is
far off neither makes the detector blind nor is itself the measure.
"""

from __future__ import annotations

from dataclasses import dataclass

SIGMA = 1.2533
"""Of a normal distribution: standard deviation over mean absolute deviation."""
MEMORY = 50
"""Weight of the newest sample is one in so many, once there are so many."""
FEW = 5
"""After n samples the deviation is taken for 1 + FEW / n times what they say: it may be luck."""
LEAST, OUTLIER = 0.02, 3.0
"""The deviation is never taken for less; a sample counts as OUTLIER deviations at most, or as a half."""


@dataclass(frozen=True, slots=True)
class Spread:
    """mean: of absolute distances; count: of samples, up to MEMORY."""

    mean: float = 0.0
    count: int = 0

    @property
    def sigma(self) -> float:
        """Standard deviation, on the safe side while few samples are known."""
        return max(LEAST, SIGMA * self.mean * (1 + FEW / max(1, self.count)))

    @property
    def most(self) -> float:
        """The farthest that a sample counts as."""
        return max(0.5, OUTLIER * self.sigma)

    def seen(self, sample: float, expected: float) -> Spread:
        """With one sample more."""
        count = min(MEMORY, self.count + 1)
        return Spread(
            self.mean + (min(self.most, abs(distance(sample, expected))) - self.mean) / count, count
        )

    def under(self, sample: float, expected: float) -> float:
        """How many standard deviations it lies below."""
        return -distance(sample, expected) / self.sigma


def distance(sample: float, expected: float) -> float:
    """-1 of nothing at all; 0 where nothing was expected."""
    return (sample - expected) / expected if expected else 0.0
