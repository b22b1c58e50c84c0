"""Reinforcement learning: models that act."""

from __future__ import annotations

import copy
from typing import Any

from bench.programs._shared import Step, descend, module, perceptron


def _sees(torch: Any, *heads: int) -> Any:
    """Convolutions over four frames of a game, and a head for each number of answers."""
    nn = torch.nn
    convs = nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU()
    last = nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512), nn.ReLU()
    parts = {"body": nn.Sequential(*convs, *last)}
    parts["heads"] = nn.ModuleList(nn.Linear(512, size) for size in heads)

    def forward(self: Any, frames: Any) -> Any:
        seen = self.body(frames / 255)
        return [head(seen) for head in self.heads]

    return module(torch, forward, **parts)


def ppo(torch: Any) -> Step:
    """Plays sixteen games for 64 frames, then learns from them, twice over, a quarter at a time."""
    nn, draws = torch.nn, torch.distributions.Categorical
    model = _sees(torch, 6, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4, eps=1e-5)
    frames = torch.randint(256, (64, 16, 4, 84, 84), dtype=torch.uint8, device="cuda")
    gains = torch.randn(64, 16, device="cuda")

    def plays() -> tuple[Any, ...]:
        seen = []
        with torch.no_grad():
            for frame in frames:
                logits, worth = model(frame)
                policy = draws(logits=logits)
                action = policy.sample()
                seen.append((action, policy.log_prob(action), worth.squeeze(1)))
        actions, likely, worth = (torch.stack(one) for one in zip(*seen, strict=True))
        better, last = torch.zeros_like(worth), torch.zeros(16, device="cuda")
        for time in reversed(range(63)):
            wrong = gains[time] + 0.99 * worth[time + 1] - worth[time]
            last = better[time] = wrong + 0.99 * 0.95 * last
        return frames.flatten(0, 1), *(
            x.flatten() for x in (actions, likely, better, better + worth)
        )

    def loss_of(seen: Any, actions: Any, before: Any, better: Any, wanted: Any) -> Any:
        logits, worth = model(seen)
        policy = draws(logits=logits)
        ratio = (policy.log_prob(actions) - before).exp()
        better = (better - better.mean()) / (better.std() + 1e-8)
        gain = torch.minimum(ratio * better, ratio.clamp(0.9, 1.1) * better).mean()
        return (
            0.5 * (worth.squeeze(1) - wanted).square().mean()
            - gain
            - 0.01 * policy.entropy().mean()
        )

    def step() -> None:
        played = plays()
        for _ in range(2):
            for some in torch.randperm(1024, device="cuda").chunk(4):
                loss_of(*(one[some] for one in played)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()

    return step


def dqn(torch: Any) -> Step:
    """What was played waits on the GPU; a copy of the network, renewed now and then, says what
    the next frame is worth."""
    model = _sees(torch, 1, 9)
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2.5e-4, alpha=0.95, centered=True)
    size, steps = 20_000, 0
    frames = torch.zeros(size, 4, 84, 84, dtype=torch.uint8, device="cuda")
    actions = torch.zeros(size, 1, dtype=torch.long, device="cuda")
    gains = torch.zeros(size, 1, device="cuda")

    def worth(model: Any, seen: Any) -> Any:
        state, better = model(seen)
        return state + better - better.mean(1, keepdim=True)

    def step() -> None:
        nonlocal steps
        for _ in range(4):
            seen = torch.randint(256, (8, 4, 84, 84), dtype=torch.uint8, device="cuda")
            with torch.no_grad():
                now = slice(steps % size, steps % size + 8)
                actions[now] = worth(model, seen).argmax(1, keepdim=True)
                frames[now], gains[now] = seen, 1.0
            steps += 8
            some = torch.randint(size - 1, (256,), device="cuda")
            with torch.no_grad():
                best = worth(model, frames[some + 1]).argmax(1, keepdim=True)
                wanted = gains[some] + 0.99 * worth(target, frames[some + 1]).gather(1, best)
            said = worth(model, frames[some]).gather(1, actions[some])
            descend(optimizer, torch.nn.functional.smooth_l1_loss(said, wanted))
        target.load_state_dict(model.state_dict())

    return step


def soft_actor_critic(torch: Any) -> Step:
    """An actor that stays as undecided as it can, and two critics with slow copies."""
    nn = torch.nn
    actor = perceptron(torch, 76, 1024, 1024, 2 * 20).cuda()
    critics = nn.ModuleList(perceptron(torch, 96, 1024, 1024, 1) for _ in range(2)).cuda()
    slow = copy.deepcopy(critics).requires_grad_(False)
    heat = torch.zeros((), device="cuda", requires_grad=True)
    acts, judges, warms = (
        torch.optim.Adam(weights, lr=3e-4)
        for weights in (actor.parameters(), critics.parameters(), [heat])
    )
    states = torch.randn(200_001, 76, device="cuda")
    actions = torch.rand(200_001, 20, device="cuda") * 2 - 1
    gains = torch.randn(200_001, device="cuda")

    def drawn(state: Any) -> tuple[Any, Any]:
        mean, spread = actor(state).chunk(2, 1)
        policy = torch.distributions.Normal(mean, spread.clamp(-20, 2).exp())
        raw = policy.rsample()
        likely = policy.log_prob(raw) - (1 - raw.tanh().square() + 1e-6).log()
        return raw.tanh(), likely.sum(1)

    def worth(critics: Any, state: Any, action: Any) -> list[Any]:
        return [critic(torch.cat([state, action], 1)).squeeze(1) for critic in critics]

    def step() -> None:
        some = torch.randint(200_000, (8192,), device="cuda")
        state, after = states[some], states[some + 1]
        with torch.no_grad():
            action, likely = drawn(after)
            wanted = torch.minimum(*worth(slow, after, action)) - heat.exp() * likely
            wanted = gains[some] + 0.99 * wanted
        said = worth(critics, state, actions[some])
        descend(judges, sum(nn.functional.mse_loss(one, wanted) for one in said))
        action, likely = drawn(state)
        best = torch.minimum(*worth(critics, state, action))
        descend(acts, (heat.exp().detach() * likely - best).mean())
        descend(warms, -(heat * (likely.detach() - 20)).mean())
        with torch.no_grad():
            torch._foreach_lerp_(list(slow.parameters()), list(critics.parameters()), 0.005)

    return step


def actor_critic(torch: Any) -> Step:
    """Plays 128 games for five frames, and learns from them at once."""
    nn, draws = torch.nn, torch.distributions.Categorical
    model = _sees(torch, 18, 1)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=7e-4, alpha=0.99, eps=1e-5)
    frame = torch.randint(256, (128, 4, 84, 84), dtype=torch.uint8, device="cuda")

    def step() -> None:
        nonlocal frame
        likely, worths, unsure, gains = [], [], [], []
        for _ in range(5):
            logits, worth = model(frame)
            policy = draws(logits=logits)
            action = policy.sample()
            likely.append(policy.log_prob(action))
            unsure.append(policy.entropy())
            worths.append(worth.squeeze(1))
            seen = torch.randint(256, (128, 1, 84, 84), dtype=torch.uint8)
            frame = torch.cat([frame[:, 1:], seen.to("cuda")], 1)
            gains.append(torch.randn(128).to("cuda"))
        with torch.no_grad():
            wanted = model(frame)[1].squeeze(1)
        aims: list[Any] = []
        for gain in reversed(gains):
            wanted = gain + 0.99 * wanted
            aims.insert(0, wanted)
        better = torch.stack(aims) - torch.stack(worths)
        gained = (torch.stack(likely) * better.detach()).mean()
        loss = 0.5 * better.square().mean() - gained - 0.01 * torch.stack(unsure).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    return step


def dreams(torch: Any) -> Step:
    """A model of the world from images: a recurrent state, and one drawn from what is seen, which
    the recurrent one should foretell."""
    nn, functional, distributions = torch.nn, torch.nn.functional, torch.distributions
    shrink: list[Any] = []
    for before, after in ((3, 32), (32, 64), (64, 128), (128, 256)):
        shrink += [nn.Conv2d(before, after, 4, 2), nn.ELU()]
    grow: list[Any] = []
    for before, after, width in ((1024, 128, 5), (128, 64, 5), (64, 32, 6)):
        grow += [nn.ConvTranspose2d(before, after, width, 2), nn.ELU()]
    parts = {
        "sees": nn.Sequential(*shrink, nn.Flatten()),
        "joins": nn.Sequential(nn.Linear(32 + 6, 256), nn.ELU()),
        "cell": nn.GRUCell(256, 256),
        "prior": perceptron(torch, 256, 256, 64, activation=nn.ELU),
        "posterior": perceptron(torch, 256 + 1024, 256, 64, activation=nn.ELU),
        "widens": nn.Sequential(nn.Linear(288, 1024), nn.Unflatten(1, (1024, 1, 1))),
        "paints": nn.Sequential(*grow, nn.ConvTranspose2d(32, 3, 6, 2)),
        "reward": perceptron(torch, 288, 256, 256, 1, activation=nn.ELU),
    }
    images = torch.rand(50, 32, 3, 64, 64, device="cuda") - 0.5
    actions = torch.rand(50, 32, 6, device="cuda") * 2 - 1
    rewards = torch.randn(50, 32, device="cuda")

    def normal(both: Any) -> Any:
        mean, spread = both.chunk(2, 1)
        return distributions.Normal(mean, functional.softplus(spread) + 0.1)

    def loss_of(model: Any) -> Any:
        seen = model.sees(images.flatten(0, 1)).view(50, 32, 1024)
        state = torch.zeros(32, 256, device="cuda")
        drawn, states, apart = torch.zeros(32, 32, device="cuda"), [], []
        for image, action in zip(seen, actions, strict=True):
            state = model.cell(model.joins(torch.cat([drawn, action], 1)), state)
            prior = normal(model.prior(state))
            posterior = normal(model.posterior(torch.cat([state, image], 1)))
            drawn = posterior.rsample()
            apart.append(distributions.kl_divergence(posterior, prior).sum(1))
            states.append(torch.cat([state, drawn], 1))
        known = torch.cat(states)
        painted = model.paints(model.widens(known))
        wrong = 0.5 * (painted - images.flatten(0, 1)).square().sum((1, 2, 3)).mean()
        wrong = wrong + 0.5 * (model.reward(known).squeeze(1) - rewards.flatten()).square().mean()
        return wrong + torch.stack(apart).mean().clamp(min=3.0)

    model = module(torch, loss_of, **parts)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-4, eps=1e-7)

    def step() -> None:
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
