"""Agents: numbers are read at every step, and the world is numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from tests.wild.placements import Placement, program


class Pole:
    """A pole on a cart, in a few lines of numpy."""

    def __init__(self, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.state = np.zeros(4)

    def reset(self) -> np.ndarray:
        self.state, self.steps = self.draw.uniform(-0.05, 0.05, 4), 0
        return self.state.astype(np.float32)

    def step(self, action: int) -> tuple[np.ndarray, float, bool]:
        x, v, angle, turn = self.state
        push = 10.0 if action == 1 else -10.0
        pull = (push + 0.05 * turn**2 * np.sin(angle)) / 1.1
        spin = (9.8 * np.sin(angle) - np.cos(angle) * pull) / (
            0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1)
        )
        speed = pull - 0.05 * spin * np.cos(angle) / 1.1
        self.state = np.array(
            [x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * turn, turn + 0.02 * spin]
        )
        self.steps += 1
        done = bool(abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21 or self.steps >= 60)
        return self.state.astype(np.float32), 1.0, done


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine1, self.dropout, self.affine2 = (
            nn.Linear(4, 32),
            nn.Dropout(0.6),
            nn.Linear(32, 2),
        )
        self.saved: list[Tensor] = []
        self.rewards: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.affine2(F.relu(self.dropout(self.affine1(x)))), dim=1)


def _discounted(rewards: list[float], gamma: float = 0.99) -> list[float]:
    total, found = 0.0, []
    for reward in rewards[::-1]:
        total = reward + gamma * total
        found.insert(0, total)
    return found


@program()
def reinforce(how: Placement) -> dict[str, Any]:
    """Policy gradients: episodes of changing length, one `.item()` per step."""
    env, policy = Pole(1), how.model(Policy())
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    lengths, losses, actions = [], [], []
    for _ in range(6):
        state, done = env.reset(), False
        while not done:
            probabilities = policy(torch.from_numpy(state).float().unsqueeze(0).to(how.device))
            m = Categorical(probabilities)
            action = m.sample()
            policy.saved.append(m.log_prob(action))
            state, reward, done = env.step(action.item())
            policy.rewards.append(reward)
            actions.append(action.item())
        returns = torch.tensor(_discounted(policy.rewards))
        returns = (returns - returns.mean()) / (returns.std() + np.finfo(np.float32).eps.item())
        terms = [-log * r for log, r in zip(policy.saved, returns.to(how.device), strict=True)]
        optimizer.zero_grad()
        loss = torch.cat(terms).sum()
        loss.backward()
        optimizer.step()
        lengths.append(len(policy.rewards))
        losses.append(loss.item())
        del policy.rewards[:], policy.saved[:]
    return {"lengths": lengths, "losses": losses, "actions": actions}


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.action, self.value = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.body(x))
        return F.softmax(self.action(x), dim=-1), self.value(x)


@program()
def actor_critic(how: Placement) -> dict[str, Any]:
    """Two heads; values are read as numbers while their graph is kept for the loss."""
    env, model = Pole(2), how.model(ActorCritic())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    running, log = 10.0, []
    for _ in range(5):
        state, done, saved, rewards = env.reset(), False, [], []
        while not done:
            probabilities, value = model(torch.from_numpy(state).to(how.device))
            m = Categorical(probabilities)
            action = m.sample()
            saved.append((m.log_prob(action), value))
            state, reward, done = env.step(action.item())
            rewards.append(reward)
        returns = torch.tensor(_discounted(rewards))
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        policy_losses, value_losses = [], []
        for (log_prob, value), r in zip(saved, returns, strict=True):
            policy_losses.append(-log_prob * (r - value.item()))
            value_losses.append(F.smooth_l1_loss(value, torch.tensor([r]).to(how.device)))
        optimizer.zero_grad()
        loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        loss.backward()
        optimizer.step()
        running = 0.05 * sum(rewards) + 0.95 * running
        log.append((len(rewards), loss.item(), running))
    return {"log": log, "parameters": model.state_dict()}


def _layer(layer: nn.Linear, std: float = 2**0.5) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, 0.0)
    return layer


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            _layer(nn.Linear(4, 32)), nn.Tanh(), _layer(nn.Linear(32, 1), std=1.0)
        )
        self.actor = nn.Sequential(
            _layer(nn.Linear(4, 32)), nn.Tanh(), _layer(nn.Linear(32, 2), std=0.01)
        )

    def act(self, x: Tensor, action: Tensor | None = None) -> tuple[Tensor, ...]:
        chance = Categorical(logits=self.actor(x))
        if action is None:
            action = chance.sample()
        return action, chance.log_prob(action), chance.entropy(), self.critic(x)


class Envs:
    """Several poles at once, each begun anew when it falls."""

    def __init__(self, count: int) -> None:
        self.envs = [Pole(10 + i) for i in range(count)]

    def reset(self) -> np.ndarray:
        return np.stack([env.reset() for env in self.envs])

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        states, rewards, dones = zip(*[e.step(a) for e, a in zip(self.envs, actions)])
        begun = [e.reset() if d else s for e, s, d in zip(self.envs, states, dones)]
        return np.stack(begun), np.array(rewards, np.float32), np.array(dones, np.float32)


class Storage:
    """What a rollout leaves: buffers that are written step by step."""

    def __init__(self, steps: int, envs: int, device: torch.device) -> None:
        self.obs = torch.zeros((steps, envs, 4)).to(device)
        self.actions = torch.zeros((steps, envs)).to(device)
        self.logprobs, self.rewards, self.dones, self.values = (
            torch.zeros((steps, envs)).to(device) for _ in range(4)
        )


def _advantages(s: Storage, last: Tensor, done: Tensor, gamma: float = 0.99) -> Tensor:
    advantages = torch.zeros_like(s.rewards)
    running: Any = 0
    for t in reversed(range(len(s.rewards))):
        final = t == len(s.rewards) - 1
        alive = 1.0 - (done if final else s.dones[t + 1])
        following = last if final else s.values[t + 1]
        delta = s.rewards[t] + gamma * following * alive - s.values[t]
        advantages[t] = running = delta + gamma * 0.95 * alive * running
    return advantages


@program()
def ppo(how: Placement) -> dict[str, Any]:
    """One file of proximal policy optimization: buffers in place, indices shuffled by numpy."""
    steps, count, size = 16, 4, 16
    np.random.seed(1)
    envs, agent = Envs(count), how.model(Agent())
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    s = Storage(steps, count, how.device)
    obs = torch.Tensor(envs.reset()).to(how.device)
    done = torch.zeros(count).to(how.device)
    log = []
    for iteration in range(1, 5):
        optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1.0) / 4) * 2.5e-4
        for step in range(steps):
            s.obs[step], s.dones[step] = obs, done
            with torch.no_grad():
                action, logprob, _, value = agent.act(obs)
                s.values[step] = value.flatten()
            s.actions[step], s.logprobs[step] = action, logprob
            state, reward, finished = envs.step(action.cpu().numpy())
            s.rewards[step] = torch.tensor(reward).to(how.device).view(-1)
            obs, done = torch.Tensor(state).to(how.device), torch.Tensor(finished).to(how.device)
        with torch.no_grad():
            advantages = _advantages(s, agent.critic(obs).reshape(1, -1), done)
            returns = advantages + s.values
        log.append(_learn(agent, optimizer, s, advantages, returns, size))
    return {"log": log, "actor": agent.actor.state_dict(), "rewards": s.rewards, "obs": s.obs}


def _learn(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    s: Storage,
    advantages: Tensor,
    returns: Tensor,
    size: int,
) -> tuple[float, ...]:
    flat = [t.reshape(-1) for t in (s.logprobs, s.actions, advantages, returns, s.values)]
    logprobs, actions, advantages, returns, values = flat
    obs, fractions = s.obs.reshape((-1, 4)), []
    indices = np.arange(len(obs))
    for _ in range(2):
        np.random.shuffle(indices)
        for start in range(0, len(obs), size):
            chosen = indices[start : start + size]
            _, new, entropy, value = agent.act(obs[chosen], actions.long()[chosen])
            ratio = (new - logprobs[chosen]).exp()
            fractions.append(((ratio - 1.0).abs() > 0.2).float().mean().item())
            a = advantages[chosen]
            a = (a - a.mean()) / (a.std() + 1e-8)
            policy = torch.max(-a * ratio, -a * torch.clamp(ratio, 0.8, 1.2)).mean()
            error = 0.5 * ((value.view(-1) - returns[chosen]) ** 2).mean()
            loss = policy - 0.01 * entropy.mean() + error * 0.5
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    guess, truth = values.cpu().numpy(), returns.cpu().numpy()
    explained = float(1 - np.var(truth - guess) / np.var(truth))
    return loss.item(), float(np.mean(fractions)), explained


class Replay:
    """What happened, in arrays of a fixed length."""

    def __init__(self, size: int) -> None:
        self.states, self.following = np.zeros((2, size, 4), np.float32)
        self.actions, self.count = np.zeros((size, 1), np.int64), 0
        self.rewards, self.dones = np.zeros((2, size), np.float32)

    def add(self, state: Any, action: int, reward: float, following: Any, done: bool) -> None:
        place = self.count % len(self.actions)
        self.states[place], self.following[place] = state, following
        self.actions[place], self.rewards[place], self.dones[place] = action, reward, done
        self.count += 1

    def sample(self, size: int, how: Placement) -> list[Tensor]:
        chosen = np.random.randint(0, min(self.count, len(self.actions)), size)
        arrays = (self.states, self.actions, self.rewards, self.following, self.dones)
        return [torch.from_numpy(array[chosen]).to(how.device) for array in arrays]


def _follow(target: nn.Module, online: nn.Module, step: int) -> None:
    """The three forms in which people write a slow copy."""
    for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
        if step % 3 == 0:
            slow.data.copy_(0.1 * fast.data + 0.9 * slow.data)
        elif step % 3 == 1:
            slow.data.mul_(0.9)
            slow.data.add_((1 - 0.9) * fast.data)
        else:
            slow.data = 0.1 * fast.data + 0.9 * slow.data


@program()
def dqn(how: Placement) -> dict[str, Any]:
    """Q-learning: a replay buffer of numpy's, and a target network that follows slowly."""
    env, replay = Pole(3), Replay(64)
    online = how.model(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)))
    target = how.model(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)))
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
    _follow(target, online, 2)
    state, losses, actions = env.reset(), [], []
    for step in range(60):
        if random.random() < max(0.05, 1 - step / 40):
            action = random.randrange(2)
        else:
            action = int(torch.argmax(online(torch.Tensor(state[None]).to(how.device)), dim=1))
        following, reward, done = env.step(action)
        replay.add(state, action, reward, following, done)
        state = env.reset() if done else following
        actions.append(action)
        if step < 16 or step % 2:
            continue
        states, taken, rewards, after, dones = replay.sample(16, how)
        with torch.no_grad():
            best, _ = target(after).max(dim=1)
            wanted = rewards + 0.99 * best * (1 - dones)
        loss = F.mse_loss(online(states).gather(1, taken).squeeze(), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        _follow(target, online, step // 2)
    return {"losses": losses, "actions": actions, "target": target.state_dict()}
