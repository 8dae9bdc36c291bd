"""A pipeline played without cleverness: pieces are tried again and again until all of them have run."""

from memadvisor.cost.pipelines import Kind


def ring_link(one, other, num_devices):
    """Neighbours d and d+1 share link d, the last and the first the last link; two devices have one link."""
    return min(one, other) if abs(one - other) == 1 else num_devices - 1


def needed(work, num_chunks):
    """What must have ended before: as (role, chunk, microbatch), where a backward has one role, split or not."""
    kind, chunk, microbatch = work
    if kind is Kind.F:
        return ("F", chunk - 1, microbatch) if chunk else None
    if kind is Kind.W:
        return ("B", chunk, microbatch)
    return ("B", chunk + 1, microbatch) if chunk < num_chunks - 1 else ("F", chunk, microbatch)


def role(work):
    return ({Kind.F: "F", Kind.W: "W"}.get(work.kind, "B"), work.chunk, work.microbatch)


def play(order, costs, links, blocking=False):
    """Start and end of every piece by (device, work)."""
    queues = [order.works(device) for device in range(order.num_devices)]
    device_of = {role(work): device for device, queue in enumerate(queues) for work in queue}
    consumers = {
        needed(work, order.num_chunks): (device, work)
        for device, queue in enumerate(queues)
        for work in queue
        if work.kind is not Kind.W
    }

    def crossing(role_needed, device):
        """Seconds that this result takes to the device."""
        if role_needed is None or device_of[role_needed] == device:
            return 0.0
        return links[ring_link(device_of[role_needed], device, order.num_devices)]

    def leaving(work):
        receiver = consumers.get(role(work))
        return crossing(role(work), receiver[0]) if receiver else 0.0

    def arrival(work, device, begin):
        """When the input is there, if the device may receive from `begin` on; None if nobody has made it yet."""
        source = needed(work, order.num_chunks)
        if source is not None and source not in ended:
            return None
        return max(ended.get(source, 0.0), begin) + crossing(source, device)

    times, ended = {}, {}
    positions = [0] * order.num_devices
    clocks = [0.0] * order.num_devices
    sending_until = [0.0] * order.num_devices
    moved = True
    while moved:
        moved = False
        for device, queue in enumerate(queues):
            if positions[device] == len(queue):
                continue
            position = positions[device]
            as_one = order.codes[device][position] in order.together
            works = queue[position : position + (2 if as_one else 1)]
            begin = clocks[device] if blocking else 0.0
            arrivals = [arrival(works[0], device, begin)]
            arrivals += [arrival(work, device, 0.0) for work in works[1:]]
            if None in arrivals:
                continue
            start = max(*arrivals, clocks[device], sending_until[device])
            end = start
            for work in works:
                end += costs[work.chunk].seconds(work.kind)
                times[device, work] = (end - costs[work.chunk].seconds(work.kind), end)
            for work in works:
                ended[role(work)] = end
            clocks[device] = end
            sending_until[device] = end + (max(map(leaving, works)) if blocking else 0.0)
            positions[device] += len(works)
            moved = True
    assert positions == [len(queue) for queue in queues], "deadlock"
    return times


def peak_bytes(order, costs, device):
    """The most that the device holds, piece by piece."""
    split = any(work.kind is Kind.W for work in order.works(device))
    held, peak = 0, 0
    for kind, chunk, _ in order.works(device):
        cost = costs[chunk]
        if kind is Kind.F:
            held += cost.activation_bytes
        peak = max(peak, held)
        if kind is Kind.BW:
            held -= cost.activation_bytes
        elif kind is Kind.B:
            held -= cost.activation_bytes - cost.weight_activation_bytes
        elif kind is Kind.W:
            assert split
            held -= cost.weight_activation_bytes
    assert held == 0
    return peak
