"""A reader that walks through a partition from its beginning, over and over."""

import threading

from tidewater_testing.parts.worker import Worker


class Walker(threading.Thread):
    """Reads a partition from its beginning, over and over, and notes every break in the order."""

    def __init__(self, worker: Worker, topic: str, partition: int) -> None:
        super().__init__(daemon=True)
        self.worker, self.topic, self.partition = worker, topic, partition
        self.halt = threading.Event()
        self.wrong: list[str] = []
        self.rounds = 0
        self.messages = 0

    def run(self) -> None:
        while not self.halt.is_set():
            offset = 0
            while not self.halt.is_set():
                answer = self.worker.get(
                    f"/v1/{self.topic}/messages?partition={self.partition}&offset={offset}"
                    "&limit=2000"
                )
                if answer.status == 503:
                    continue
                if answer.status != 200:
                    self.wrong.append(f"G3 One stream: {answer.status} {answer.body!r}")
                    return
                page = answer.json()
                offsets = [message["offset"] for message in page["messages"]]
                if offsets != list(range(offset, offset + len(offsets))):
                    self.wrong.append(f"G3 One stream: partition {self.partition} at {offset}")
                    return
                self.messages += len(offsets)
                offset = page["next_offset"]
                if offset >= page["end_offset"]:
                    break
            self.rounds += 1
