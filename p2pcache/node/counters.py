"""What a node counts, each with a one-line meaning."""

from __future__ import annotations

from collections import Counter

MEANINGS = {
    "lookups": "lookups asked by this node's engines",
    "chunks": "chunks in those lookups",
    "lookup_rpcs": "requests to directory owners for them",
    "hits_exact": "chunks found with the prompt's exact key",
    "hits_content": "chunks found by content, at another position or behind other tokens",
    "served_local": "chunks an engine read from this node's host tier",
    "served_nvme": "chunks an engine read after promotion from this node's NVMe tier",
    "served_peer": "chunks an engine read after a pull from a peer",
    "bytes_local": "bytes of those from the host tier",
    "bytes_nvme": "bytes of those from the NVMe tier",
    "bytes_peer": "bytes of those pulled",
    "joined": "pulls saved because the same body was already under way",
    "stored": "bodies committed by engines",
    "evicted": "bodies that left the host tier",
    "demoted": "bodies copied from the host to the NVMe tier",
    "nvme_refused": "bodies dropped unwritten: over the NVMe tier's write rate, or never used",
    "nvme_evicted": "bodies that left the NVMe tier",
    "tickets": "bodies leased to peers",
    "tickets_refused": "bodies that peers asked for and did not get",
    "retried_pulls": "times that all holders of a body were busy and it was asked for again later",
    "corrupt": "bodies whose bytes did not match their checksum; none of them was served",
    "quarantined": "slots kept out of use because a late write was still possible",
    "unpublished": "batches to owners that were lost: publishes come again, withdrawals time out",
}
"""Besides these: `miss_<reason>` per `types.Miss`, `pulls_<transport>`, `failed_<transport>`."""


class Counters(Counter[str]):
    """Plain counts by name; see MEANINGS."""

    def snapshot(self) -> dict[str, int]:
        return {name: self[name] for name in MEANINGS} | dict(sorted(self.items()))
