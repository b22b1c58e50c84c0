"""Recurrent, convolutional and attending models of sequences of tokens."""

from __future__ import annotations

from typing import Any

from bench.programs._shared import Step, module, training


def lstm(torch: Any) -> Step:
    nn = torch.nn
    embed, rnn, head = nn.Embedding(20000, 512), nn.LSTM(512, 512, 2), nn.Linear(512, 20000)
    model = nn.ModuleList([embed, rnn, head]).cuda()
    tokens = torch.randint(20000, (128, 32), device="cuda")

    def loss_of(model: Any) -> Any:
        hidden, _state = model[1](model[0](tokens))
        return nn.functional.cross_entropy(model[2](hidden).flatten(0, 1), tokens.flatten())

    return training(torch, model, loss_of)


def encoder_scaled(torch: Any) -> Step:
    """Half precision, a scaler, gradients that are clipped, two micro-batches a step."""
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 6), nn.Linear(768, 10)).cuda()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler()
    x, y = torch.randn(8, 256, 768, device="cuda"), torch.randint(10, (8,), device="cuda")

    def step() -> None:
        for _ in range(2):
            with torch.autocast("cuda", torch.float16):
                loss = nn.functional.cross_entropy(model(x).mean(1), y) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def gru_remembers(torch: Any) -> Step:
    """The state goes on from step to step. Embedding and head share a weight."""
    nn = torch.nn
    embed, rnn = nn.Embedding(16000, 512), nn.GRU(512, 512, 2, dropout=0.2)
    model = module(torch, lambda self, x, h: self.rnn(self.embed(x), h), embed=embed, rnn=rnn)
    tokens = torch.randint(16000, (65, 48), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = torch.zeros(2, 48, 512, device="cuda")

    def step() -> None:
        nonlocal state
        hidden, state = model(tokens[:-1], state.detach())
        logits = hidden @ embed.weight.T
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()

    return step


def tagger(torch: Any) -> Step:
    """Reads sentences of unlike lengths, packed, in both directions."""
    nn = torch.nn
    embed, head = nn.Embedding(40000, 200, padding_idx=0), nn.Linear(512, 17)
    rnn = nn.LSTM(200, 256, 2, batch_first=True, bidirectional=True, dropout=0.3)
    lengths = torch.arange(80, 16, -1)
    words = torch.randint(1, 40000, (64, 80), device="cuda")
    tags = torch.randint(17, (64, 80), device="cuda")
    blank = torch.arange(80, device="cuda") >= lengths.cuda()[:, None]
    words, tags = words.masked_fill(blank, 0), tags.masked_fill(blank, -100)

    def forward(self: Any, words: Any) -> Any:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(words), lengths, batch_first=True)
        read, _state = self.rnn(packed)
        return self.head(nn.utils.rnn.pad_packed_sequence(read, batch_first=True)[0])

    model = module(torch, forward, embed=embed, rnn=rnn, head=head)
    loss = nn.functional.cross_entropy
    adam = {"optimizer": torch.optim.Adam, "lr": 2e-3}
    return training(torch, model, lambda m: loss(m(words).mT, tags), **adam)


def translator(torch: Any) -> Step:
    """A decoder of one cell that attends to what the encoder read, word by word."""
    nn = torch.nn
    parts = {
        "embed": nn.Embedding(12000, 256),
        "encoder": nn.GRU(256, 256, bidirectional=True, batch_first=True),
        "cell": nn.GRUCell(256 + 512, 512),
        "query": nn.Linear(512, 256),
        "key": nn.Linear(512, 256),
        "score": nn.Linear(256, 1),
        "head": nn.Linear(1024, 12000),
    }
    texts = torch.randint(12000, (64, 40), device="cuda")
    answers = torch.randint(12000, (64, 32), device="cuda")

    def forward(self: Any, texts: Any, answers: Any) -> Any:
        read, last = self.encoder(self.embed(texts))
        state, keys, said = last.transpose(0, 1).flatten(1), self.key(read), []
        for word in self.embed(answers).unbind(1):
            scores = self.score(torch.tanh(keys + self.query(state)[:, None]))
            seen = (scores.softmax(1) * read).sum(1)
            state = self.cell(torch.cat([word, seen], 1), state)
            said.append(torch.cat([state, seen], 1))
        return self.head(torch.stack(said, 1))

    def loss_of(model: Any) -> Any:
        logits = model(texts, answers[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), answers[:, 1:].flatten())

    return training(torch, module(torch, forward, **parts), loss_of, optimizer=torch.optim.Adam)


def text_cnn(torch: Any) -> Step:
    """Convolutions over words, three to five at a time, and the greatest of each."""
    nn = torch.nn
    convs = nn.ModuleList(nn.Conv1d(300, 256, width) for width in (3, 4, 5))
    embed = nn.Embedding(50000, 300)
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(768, 20))
    words = torch.randint(50000, (256, 200), device="cuda")
    topics = torch.randint(20, (256,), device="cuda")

    def forward(self: Any, words: Any) -> Any:
        x = self.embed(words).mT
        found = [torch.relu(conv(x)).amax(-1) for conv in self.convs]
        return self.head(torch.cat(found, 1))

    model = module(torch, forward, embed=embed, convs=convs, head=head)
    loss = nn.functional.cross_entropy
    adagrad = {"optimizer": torch.optim.Adagrad, "lr": 0.01}
    return training(torch, model, lambda m: loss(m(words), topics), **adagrad)


def writes_letters(torch: Any) -> Step:
    """Learns from letters, then writes some, one after another."""
    nn = torch.nn
    parts = {
        "embed": nn.Embedding(96, 128),
        "rnn": nn.LSTM(128, 512, 3, dropout=0.5, batch_first=True),
        "head": nn.Linear(512, 96),
    }

    def forward(self: Any, letters: Any, state: Any = None) -> Any:
        read, state = self.rnn(self.embed(letters), state)
        return self.head(read), state

    model = module(torch, forward, **parts)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    text = torch.randint(96, (128, 101), device="cuda")

    def writes() -> list[int]:
        model.eval()
        letter, state, written = text[:1, :1], None, []
        with torch.no_grad():
            for _ in range(32):
                logits, state = model(letter, state)
                letter = torch.multinomial((logits[:, -1] / 0.8).softmax(-1), 1)
                written.append(letter.item())
        model.train()
        return written

    def step() -> object:
        logits, _state = model(text[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, 96), text[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        return writes()

    return step


def judges_reviews(torch: Any) -> Step:
    """An encoder of `torch.nn`, told where the texts end; each weight moves by the sign of its
    momentum."""
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(256, 8, 1024, 0.1, batch_first=True, norm_first=True)
    parts = {
        "embed": nn.Embedding(30000, 256, padding_idx=0),
        "places": nn.Embedding(256, 256),
        "body": nn.TransformerEncoder(layer, 4, nn.LayerNorm(256), enable_nested_tensor=False),
        "head": nn.Linear(256, 2),
    }
    words = torch.randint(1, 30000, (64, 256), device="cuda")
    lengths = torch.arange(256, 64, -3, device="cuda")
    words = words.masked_fill(torch.arange(256, device="cuda") >= lengths[:, None], 0)
    liked = torch.randint(2, (64,), device="cuda")

    def forward(self: Any, words: Any) -> Any:
        blank = words == 0
        x = self.embed(words) * 16 + self.places.weight
        x = self.body(x, src_key_padding_mask=blank).masked_fill(blank[..., None], 0.0)
        return self.head(x.sum(1) / (~blank).sum(1, keepdim=True))

    model = module(torch, forward, **parts)
    momenta = {weight: torch.zeros_like(weight) for weight in model.parameters()}

    def step() -> None:
        loss = nn.functional.cross_entropy(model(words), liked)
        loss.backward()
        with torch.no_grad():
            for weight, momentum in momenta.items():
                weight.mul_(1 - 1e-4 * 0.1)
                update = momentum.mul(0.9).add(weight.grad, alpha=0.1)
                weight.add_(update.sign_(), alpha=-1e-4)
                momentum.mul_(0.99).add_(weight.grad, alpha=0.01)
        model.zero_grad()

    return step


def temporal_convolutions(torch: Any) -> Step:
    """Causal convolutions, ever more dilated, each with its weight normalised."""
    nn = torch.nn
    normalised = nn.utils.parametrizations.weight_norm

    def forward(self: Any, x: Any) -> Any:
        y = x
        for conv in self.convs:
            y = self.drop(torch.relu(conv(nn.functional.pad(y, (self.reach, 0)))))
        return torch.relu(y + self.short(x))

    def block(before: int, after: int, dilation: int) -> Any:
        sizes = (before, after), (after, after)
        convs = (normalised(nn.Conv1d(a, b, 3, dilation=dilation)) for a, b in sizes)
        short = nn.Identity() if before == after else nn.Conv1d(before, after, 1)
        parts = {"convs": nn.ModuleList(convs), "drop": nn.Dropout(0.2), "reach": 2 * dilation}
        return module(torch, forward, short=short, **parts)

    blocks = [block(8 if not i else 128, 128, 2**i) for i in range(7)]
    model = nn.ModuleList([nn.Sequential(*blocks), nn.Linear(128, 8)]).cuda()
    series = torch.randn(64, 8, 512, device="cuda").cumsum(2)

    def loss_of(model: Any) -> Any:
        said = model[1](model[0](series[:, :, :-1]).transpose(1, 2)).transpose(1, 2)
        return nn.functional.mse_loss(said, series[:, :, 1:])

    return training(torch, model, loss_of, optimizer=torch.optim.Adam, lr=1e-3)


def basis_expansion(torch: Any) -> Step:
    """Each block explains a part of a series; the next sees what is left."""
    nn = torch.nn
    count, back, ahead = 30, 240, 48

    def block() -> Any:
        layers: list[Any] = []
        for before in (back, 512, 512, 512):
            layers += [nn.Linear(before, 512), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(512, back + ahead))

    def forward(self: Any, seen: Any) -> Any:
        foretold: Any = 0
        for one in self.blocks:
            explained, more = one(seen).split([back, ahead], 1)
            seen, foretold = seen - explained, foretold + more
        return foretold

    model = module(torch, forward, blocks=nn.ModuleList(block() for _ in range(count)))
    series = torch.rand(5000, 1000, device="cuda") + 0.5

    def loss_of(model: Any) -> Any:
        which = torch.randint(5000, (1024, 1), device="cuda")
        start = torch.randint(1000 - back - ahead, (1024, 1), device="cuda")
        window = series[which, start + torch.arange(back + ahead, device="cuda")]
        seen, wanted = window.split([back, ahead], 1)
        said = model(seen)
        return (2 * (said - wanted).abs() / (said.abs() + wanted.abs()).detach()).mean()

    return training(torch, model, loss_of, optimizer=torch.optim.Adam, lr=1e-3)


def foretells_spread(torch: Any) -> Step:
    """A recurrent network says how each next value is distributed, then draws many futures."""
    nn = torch.nn
    parts = {
        "who": nn.Embedding(370, 32),
        "rnn": nn.LSTM(1 + 4 + 32, 128, 3, dropout=0.1, batch_first=True),
        "mean": nn.Linear(128, 1),
        "spread": nn.Sequential(nn.Linear(128, 1), nn.Softplus()),
    }
    series = torch.randn(256, 193, 1, device="cuda")
    times = torch.rand(256, 193, 4, device="cuda")
    who = torch.randint(370, (256,), device="cuda")

    def forward(self: Any, value: Any, time: Any, who: Any, state: Any = None) -> Any:
        own = self.who(who)[:, None].expand(-1, value.shape[1], -1)
        read, state = self.rnn(torch.cat([value, time, own], 2), state)
        return torch.distributions.Normal(self.mean(read), self.spread(read) + 1e-6), state

    model = module(torch, forward, **parts)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def futures() -> Any:
        few = who[:16].repeat_interleave(100)
        hours = times[:16].repeat_interleave(100, 0)
        drawn = []
        _next, state = model(series[:16, :168].repeat_interleave(100, 0), hours[:, :168], few)
        value = _next.mean[:, -1:]
        for hour in range(168, 192):
            follows, state = model(value, hours[:, hour : hour + 1], few, state)
            value = follows.sample()
            drawn.append(value)
        paths = torch.cat(drawn, 1).view(16, 100, 24)
        return paths.quantile(torch.tensor([0.1, 0.5, 0.9], device="cuda"), dim=1).cpu()

    def step() -> object:
        optimizer.zero_grad()
        said, _state = model(series[:, :-1], times[:, 1:], who)
        (-said.log_prob(series[:, 1:])).mean().backward()
        optimizer.step()
        with torch.no_grad():
            return futures()

    return step
